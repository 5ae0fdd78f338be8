// Attention for one instruction set; CMakeLists.txt gives this unit its flags.

#include "attention/loops.h"

namespace fewbit {

#if defined(FEWBIT_EMULATE_AVX512)
void AttendEmulatedAvx512(const AttendBlock& block);
void AttendEmulatedAvx512(const AttendBlock& block) { AttendOneBlock(block); }
#else
void AttendAvx512(const AttendBlock& block) { AttendOneBlock(block); }
#endif

}  // namespace fewbit
