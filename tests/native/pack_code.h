// One code of a weight in panels, straight from the layout's definition; and every instruction set
// that can run here.

#ifndef FEWBIT_TESTS_NATIVE_PACK_CODE_H_
#define FEWBIT_TESTS_NATIVE_PACK_CODE_H_

#include <cstdint>
#include <cstdio>
#include <vector>

#include "isa/isa.h"
#include "matmul/matmul.h"

namespace fewbit {

#if defined(FEWBIT_EMULATE_AVX512)
extern const Kernels kEmulatedAvx512Kernels;
#endif

// Row i, column j of a matrix of `blocks` blocks of rows; `data` begins as zeros.
inline void PackCode(int64_t i, int64_t j, int code, int bits, int64_t blocks, uint8_t* data) {
  const int64_t inside = i % kBlock, byte = inside % 4;
  uint8_t* block =
      data + ((j / kPanel) * blocks + i / kBlock) * bits * kPanel * 4 + j % kPanel * 4 + byte;
  if (bits == 8) {
    block[inside / 4 * kPanel * 4] = static_cast<uint8_t>(code);
    return;
  }
  int row = 0, low = 0;
  for (int plane = 4; plane > 0; plane /= 2) {
    if (bits & plane) {
      const int64_t per_word = 8 / plane, quad = inside / 4;
      const int piece = code >> low & ((1 << plane) - 1);
      uint8_t* at = block + (row + quad / per_word) * kPanel * 4;
      *at = static_cast<uint8_t>(*at | piece << (quad % per_word * plane));
      row += plane;
      low += plane;
    }
  }
}

inline std::vector<const Kernels*> SetsToTest() {
  std::vector<const Kernels*> sets = {&kPortableKernels};
  const Kernels* best = ChosenIsa().kernels;
  if (best != sets[0]) {
    sets.push_back(best);
  }
#if defined(__x86_64__)
  if (best != &kAvx2Kernels && __builtin_cpu_supports("avx2")) {
    sets.push_back(&kAvx2Kernels);
  }
#endif
#if defined(FEWBIT_EMULATE_AVX512)
  sets.push_back(&kEmulatedAvx512Kernels);
#else
  std::printf("not tested: avx512_vnni emulated (SIMDe is not installed; Debian: libsimde-dev)\n");
#endif
  return sets;
}

}  // namespace fewbit

#endif  // FEWBIT_TESTS_NATIVE_PACK_CODE_H_
