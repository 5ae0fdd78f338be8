// Attention for one instruction set; CMakeLists.txt gives this unit its flags.

#include "attention/loops.h"

namespace fewbit {

void AttendAvx2(const AttendBlock& block) { AttendOneBlock(block); }

}  // namespace fewbit
