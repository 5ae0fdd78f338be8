// The elementwise functions for one instruction set; CMakeLists.txt gives this unit its flags.

#include "common/finish_loops.h"

namespace fewbit {

void FinishAvx2(const FinishRow& row) { FinishOneRow(row); }

}  // namespace fewbit
