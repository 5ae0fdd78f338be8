// The elementwise functions for one instruction set; CMakeLists.txt gives this unit its flags.

#include "finish_loops.h"

namespace fewbit {

void FinishAvx512(const FinishRow& row) { FinishOneRow(row); }

}  // namespace fewbit
