// Attention for one instruction set; CMakeLists.txt gives this unit its flags.

#include "attention/loops.h"

namespace fewbit {

void AttendPortable(const AttendBlock& block) { AttendOneBlock(block); }

}  // namespace fewbit
