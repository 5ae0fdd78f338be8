#include "common/finish.h"

#include <string_view>

namespace fewbit {
namespace {

// In the order of the enumeration. Words of the Python side too (fewbit/kernels/_finish.py).
constexpr const char* kNames[] = {
    "none", "relu", "relu6", "gelu", "gelu_exact", "tanh",
    "silu/cephes/once", "silu/cephes/twice", "silu/fdlibm/once", "silu/fdlibm/twice",
    "sigmoid/cephes/once", "sigmoid/cephes/twice", "sigmoid/fdlibm/once", "sigmoid/fdlibm/twice"};

}  // namespace

bool FindElementwise(const char* name, size_t length, Elementwise* found) {
  int32_t number = 0;
  for (const char* known : kNames) {
    if (std::string_view(name, length) == known) {
      *found = static_cast<Elementwise>(number);
      return true;
    }
    ++number;
  }
  return false;
}

std::string ElementwiseNames() {
  std::string names;
  for (const char* known : kNames) {
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  return names;
}

}  // namespace fewbit
