// One pass over floating-point elements in host memory: how far two tensors are apart, and statistics of one.
// `datastates diff` and `show --stats` read checkpoints at the disk's rate; a dozen passes of torch
// operations in float64 would take ten times as long as the disk.
//
// Everything is computed in double. Nothing here knows of Python, files or the engine; all is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

enum class NumberKind { kFloat64, kFloat32, kFloat16, kBfloat16 };

size_t ElementBytes(NumberKind kind);

// Of elements that are finite on both sides, unless stated otherwise. NaN equals NaN, and 0 equals -0.
struct Drift {
  uint64_t changed = 0;
  double largest_absolute = 0;  // |a - b|
  double largest_relative = 0;  // |a - b| / max(|a|, |b|)
  uint64_t not_finite = 0;      // changed elements of which at least one side is NaN or infinite
  double squares_apart = 0;     // sum of (a - b)^2
  double squares_first = 0;     // sum of a^2 over all finite a
};

struct Statistics {
  uint64_t finite = 0, nans = 0;
  double minimum = 0, maximum = 0;  // of finite elements; 0 if there are none
  double total = 0, squares = 0;    // sums over finite elements
};

// `left` and `right` hold `count` elements each, aligned to nothing in particular.
Drift CompareNumbers(NumberKind kind, const void* left, const void* right, size_t count);
Statistics SummarizeNumbers(NumberKind kind, const void* data, size_t count);

}  // namespace datastates
