// The FFI target fewbit_cached_attention. The caches are operands and results: the same memory,
// which XLA gives to the call as its own.

#include <algorithm>
#include <limits>
#include <string>

#include "attention/cached_attention.h"
#include "ffi/exports.h"
#include "ffi/checks.h"
#include "isa/isa.h"

namespace ffi = xla::ffi;

namespace {

using fewbit::Require;
using fewbit::Show;

void RequireDims(const char* what, ffi::Span<const int64_t> dims,
                 std::initializer_list<int64_t> wanted) {
  Require(std::equal(dims.begin(), dims.end(), wanted.begin(), wanted.end()),
          std::string(what) + " must have the shape " + Show({wanted.begin(), wanted.size()}) +
              " but has " + Show(dims));
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> key,
                  ffi::Buffer<ffi::F32> value, ffi::Buffer<ffi::F32> keys,
                  ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> start,
                  ffi::Buffer<ffi::PRED> enters, ffi::Buffer<ffi::PRED> mask,
                  ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_keys,
                  ffi::ResultBuffer<ffi::F32> new_values, float factor, float soft_cap) {
  return fewbit::Checked("fewbit cached_attention", [&] {
    const auto q = query.dimensions(), cache = keys.dimensions();
    Require(q.size() == 4, "query must be [batch, new, heads, dim] but has the shape " + Show(q));
    Require(cache.size() == 4,
            "the cache must be [batch, length, key heads, dim] but has the shape " + Show(cache));
    fewbit::CachedAttention a{};
    a.batch = q[0];
    a.fresh = q[1];
    a.heads = q[2];
    a.dim = q[3];
    a.length = cache[1];
    a.key_heads = cache[2];
    Require(a.key_heads > 0 && a.heads % a.key_heads == 0,
            std::to_string(a.heads) + " heads cannot share " + std::to_string(a.key_heads));
    Require(a.fresh <= a.length && a.length <= std::numeric_limits<int32_t>::max(),
            std::to_string(a.fresh) + " new tokens do not fit a cache of " +
                std::to_string(a.length));
    RequireDims("keys", cache, {a.batch, a.length, a.key_heads, a.dim});
    RequireDims("values", values.dimensions(), {a.batch, a.length, a.key_heads, a.dim});
    RequireDims("key", key.dimensions(), {a.batch, a.fresh, a.key_heads, a.dim});
    RequireDims("value", value.dimensions(), {a.batch, a.fresh, a.key_heads, a.dim});
    RequireDims("start", start.dimensions(), {});
    RequireDims("mask", mask.dimensions(), {a.batch, a.fresh, a.length});
    RequireDims("the result", out->dimensions(), {a.batch, a.fresh, a.heads, a.dim});
    RequireDims("the new keys", new_keys->dimensions(), {a.batch, a.length, a.key_heads, a.dim});
    RequireDims("the new values", new_values->dimensions(),
                {a.batch, a.length, a.key_heads, a.dim});
    Require(new_keys->typed_data() == keys.typed_data() &&
                new_values->typed_data() == values.typed_data(),
            "the caches must be aliased to their results");
    if (enters.dimensions().size() != 1) {  // [0]: all of them enter
      RequireDims("enters", enters.dimensions(), {a.batch, a.fresh});
      a.enters = reinterpret_cast<const uint8_t*>(enters.typed_data());
    }
    a.query = query.typed_data();
    a.key = key.typed_data();
    a.value = value.typed_data();
    a.mask = reinterpret_cast<const uint8_t*>(mask.typed_data());
    // Clamped, as jax.lax.dynamic_update_slice does.
    a.start = std::min<int64_t>(std::max<int64_t>(*start.typed_data(), 0), a.length - a.fresh);
    a.factor = factor;
    a.soft_cap = soft_cap;
    a.keys = new_keys->typed_data();
    a.values = new_values->typed_data();
    a.out = out->typed_data();
    fewbit::RunAttention(fewbit::ChosenIsa().kernels->attend, fewbit::WorkersOf(pool), a);
  });
}

}  // namespace

FEWBIT_EXPORT_HANDLER(fewbit_cached_attention);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_cached_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("factor")
                                  .Attr<float>("soft_cap"));
