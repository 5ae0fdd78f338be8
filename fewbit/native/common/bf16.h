// bfloat16 to and from float. For the units that are compiled for any CPU only: see
// matmul/kernels.h for why nothing inline may be shared with the others.

#ifndef FEWBIT_NATIVE_BF16_H_
#define FEWBIT_NATIVE_BF16_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fewbit {

inline float FromBf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) {
    return static_cast<uint16_t>(bits >> 16 | 0x40);
  }
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_BF16_H_
