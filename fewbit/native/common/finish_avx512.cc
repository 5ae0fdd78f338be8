// The elementwise functions for one instruction set; CMakeLists.txt gives this unit its flags.

#include "common/finish_loops.h"

namespace fewbit {

#if defined(FEWBIT_EMULATE_AVX512)
void FinishEmulatedAvx512(const FinishRow& row);
void FinishEmulatedAvx512(const FinishRow& row) { FinishOneRow(row); }
#else
void FinishAvx512(const FinishRow& row) { FinishOneRow(row); }
#endif

}  // namespace fewbit
