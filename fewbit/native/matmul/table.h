// The table of one instruction set's kernels.
// Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_MATMUL_TABLE_H_
#define FEWBIT_NATIVE_MATMUL_TABLE_H_

#include "codes/direct.h"
#include "codes/pack.h"
#include "codes/quantize.h"
#include "conv/kernels.h"
#include "matmul/dots.h"
#include "matmul/stream_int.h"
#include "matmul/tiles.h"
#include "codes/quantize_rows.h"

namespace fewbit {
namespace {

void SumCodes(const int8_t* codes, const int64_t* segment_quads, int64_t segments, uint32_t zero,
              int32_t* sums) {
  for (int64_t s = 0; s < segments; ++s) {
    int32_t sum = 0;
    for (int64_t k = segment_quads[s] * 4; k < segment_quads[s + 1] * 4; ++k) {
      sum += codes[k];
    }
    sums[s] = static_cast<int32_t>(0u - static_cast<uint32_t>(sum) * zero);
  }
}

// Null where the planes of a row are rows like any other, and joined at the end.
template <class T, int kBits>
constexpr void (*JoinedPlanes())(const StreamInt&) {
  if constexpr (T::kWholePanels) {
    return StreamIntPanel<T, kBits, T::kPlaneRows, true>;
  } else {
    return nullptr;
  }
}

template <class T, int kRows>
constexpr void (*GroupTile())(const TileInt&) {
  if constexpr (kRows <= T::kGroupRows) {
    return TileGroupRows<T, kRows>;
  } else {
    return nullptr;
  }
}

// Heights that the instruction set does not use are not compiled; the driver never asks for them.
#define FEWBIT_STREAM(function, type, most)                                                \
  {                                                                                        \
    function<T, type, 1>, function<T, type, (most > 1 ? 2 : 1)>,                           \
        function<T, type, (most > 2 ? 3 : 1)>, function<T, type, (most > 3 ? 4 : 1)>       \
  }
#define FEWBIT_TILES(type)                                                                 \
  {                                                                                        \
    TileIntRows<T, type, 1>, TileIntRows<T, type, 2>,                                      \
        TileIntRows<T, type, (T::kIntRows > 2 ? 3 : 1)>,                                   \
        TileIntRows<T, type, (T::kIntRows > 3 ? 4 : 1)>,                                   \
        TileIntRows<T, type, (T::kIntRows > 4 ? 5 : 1)>,                                   \
        TileIntRows<T, type, (T::kIntRows > 5 ? 6 : 1)>                                    \
  }

template <class T>
constexpr Kernels MakeKernels(const char* name, const ConvKernels* conv,
                              void (*finish)(const FinishRow&),
                              void (*attend)(const AttendBlock&)) {
  return Kernels{
      name,
      T::kStreamRows,
      T::kStreamIntRows,
      T::kPlaneRows,
      T::kFloatRows,
      T::kFloatVectors,
      T::kIntRows,
      T::kIntVectors,
      T::kGroupRows,
      T::kDotRows,
      T::kDotLanes,
      {0, T::Words(1), T::Words(2), T::Words(3), T::Words(4), T::Words(5), T::Words(6), T::Words(7),
       T::Words(8)},
      {false, false, false, false, false, false, false, false, T::kPanelIsUnpacked},
      QuantizeOneRow<T>,
      SumCodes,
      PackCodes,
      {FEWBIT_STREAM(StreamFloatRows, 0, T::kStreamRows), FEWBIT_STREAM(StreamFloatRows, 1, T::kStreamRows),
       FEWBIT_STREAM(StreamFloatRows, 2, T::kStreamRows), FEWBIT_STREAM(StreamFloatRows, 3, T::kStreamRows),
       FEWBIT_STREAM(StreamFloatRows, 4, T::kStreamRows), FEWBIT_STREAM(StreamFloatRows, 5, T::kStreamRows),
       FEWBIT_STREAM(StreamFloatRows, 6, T::kStreamRows), FEWBIT_STREAM(StreamFloatRows, 7, T::kStreamRows),
       FEWBIT_STREAM(StreamFloatRows, 8, T::kStreamRows), FEWBIT_STREAM(StreamFloatRows, 9, T::kStreamRows),
       FEWBIT_STREAM(StreamFloatRows, 10, T::kStreamRows)},
      {FEWBIT_STREAM(StreamIntRows, 1, T::kPlaneRows), FEWBIT_STREAM(StreamIntRows, 2, T::kPlaneRows),
       FEWBIT_STREAM(StreamIntRows, 3, T::kPlaneRows), FEWBIT_STREAM(StreamIntRows, 4, T::kPlaneRows),
       FEWBIT_STREAM(StreamIntRows, 5, T::kPlaneRows), FEWBIT_STREAM(StreamIntRows, 6, T::kPlaneRows),
       FEWBIT_STREAM(StreamIntRows, 7, T::kPlaneRows), FEWBIT_STREAM(StreamIntRows, 8, T::kPlaneRows)},
      {JoinedPlanes<T, 1>(), JoinedPlanes<T, 2>(), JoinedPlanes<T, 3>(), JoinedPlanes<T, 4>(),
       JoinedPlanes<T, 5>(), JoinedPlanes<T, 6>(), JoinedPlanes<T, 7>(), JoinedPlanes<T, 8>()},
      {UnpackFloat<T, 0>, UnpackFloat<T, 1>, UnpackFloat<T, 2>, UnpackFloat<T, 3>,
       UnpackFloat<T, 4>, UnpackFloat<T, 5>, UnpackFloat<T, 6>, UnpackFloat<T, 7>,
       UnpackFloat<T, 8>, UnpackFloat<T, 9>, UnpackFloat<T, 10>},
      {UnpackInt<T, 1>, UnpackInt<T, 2>, UnpackInt<T, 3>, UnpackInt<T, 4>, UnpackInt<T, 5>,
       UnpackInt<T, 6>, UnpackInt<T, 7>, UnpackInt<T, 8>},
      {TileFloatRows<T, 1>, TileFloatRows<T, 2>, TileFloatRows<T, (T::kFloatRows > 2 ? 3 : 1)>,
       TileFloatRows<T, (T::kFloatRows > 3 ? 4 : 1)>, TileFloatRows<T, (T::kFloatRows > 4 ? 5 : 1)>,
       TileFloatRows<T, (T::kFloatRows > 5 ? 6 : 1)>},
      {FEWBIT_TILES(1), FEWBIT_TILES(2), FEWBIT_TILES(3),
       FEWBIT_TILES(4), FEWBIT_TILES(5), FEWBIT_TILES(6),
       FEWBIT_TILES(7), FEWBIT_TILES(8)},
      {GroupTile<T, 1>(), GroupTile<T, 2>(), GroupTile<T, 3>(), GroupTile<T, 4>(),
       GroupTile<T, 5>(), GroupTile<T, 6>()},
      {FEWBIT_STREAM(StreamDotsRows, 0, T::kStreamRows), FEWBIT_STREAM(StreamDotsRows, 1, T::kStreamRows),
       FEWBIT_STREAM(StreamDotsRows, 2, T::kStreamRows), FEWBIT_STREAM(StreamDotsRows, 3, T::kStreamRows),
       FEWBIT_STREAM(StreamDotsRows, 4, T::kStreamRows), FEWBIT_STREAM(StreamDotsRows, 5, T::kStreamRows),
       FEWBIT_STREAM(StreamDotsRows, 6, T::kStreamRows), FEWBIT_STREAM(StreamDotsRows, 7, T::kStreamRows),
       FEWBIT_STREAM(StreamDotsRows, 8, T::kStreamRows), FEWBIT_STREAM(StreamDotsRows, 9, T::kStreamRows),
       FEWBIT_STREAM(StreamDotsRows, 10, T::kStreamRows)},
      {AddLanes<T, 0>, AddLanes<T, 1>, AddLanes<T, 2>, AddLanes<T, 3>, AddLanes<T, 4>,
       AddLanes<T, 5>, AddLanes<T, 6>, AddLanes<T, 7>, AddLanes<T, 8>, AddLanes<T, 9>,
       AddLanes<T, 10>},
      {UnpackDotsOf<T, 0>, UnpackDotsOf<T, 1>, UnpackDotsOf<T, 2>, UnpackDotsOf<T, 3>,
       UnpackDotsOf<T, 4>, UnpackDotsOf<T, 5>, UnpackDotsOf<T, 6>, UnpackDotsOf<T, 7>,
       UnpackDotsOf<T, 8>, UnpackDotsOf<T, 9>, UnpackDotsOf<T, 10>},
      {TileDotsRows<T, 1>, TileDotsRows<T, 2>, TileDotsRows<T, (T::kDotRows > 2 ? 3 : 1)>,
       TileDotsRows<T, (T::kDotRows > 3 ? 4 : 1)>, TileDotsRows<T, (T::kDotRows > 4 ? 5 : 1)>,
       TileDotsRows<T, (T::kDotRows > 5 ? 6 : 1)>},
      {UnpackTurnedOf<T, 0>, UnpackTurnedOf<T, 1>, UnpackTurnedOf<T, 2>, UnpackTurnedOf<T, 3>,
       UnpackTurnedOf<T, 4>, UnpackTurnedOf<T, 5>, UnpackTurnedOf<T, 6>, UnpackTurnedOf<T, 7>,
       UnpackTurnedOf<T, 8>, UnpackTurnedOf<T, 9>, UnpackTurnedOf<T, 10>},
      conv,
      finish,
      attend,
      PackRows,
      PackTouchingTiles,
      PackColumns,
      {DotColumns<T, 1>, DotColumns<T, 2>, DotColumns<T, 3>, DotColumns<T, 4>},
      {AddRows<T, 1>, AddRows<T, 2>, AddRows<T, 3>, AddRows<T, 4>},
      ScaleOneRow,
      LargestOfColumns,
      ScalesOfColumns,
      CodesOfColumns,
  };
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_TABLE_H_
