#include "numbers/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace datastates {
namespace {

// Elements that are converted to double at a time: they stay in the first-level cache.
constexpr size_t kBlock = 1024;
// Sums are kept apart by lane, as the compiler may not reorder additions to use vector instructions.
constexpr size_t kLanes = 4;
static_assert(kBlock % kLanes == 0);

template <typename To, typename From>
To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Types of elements: how they are stored, and their value.
struct Float64 {
  using Stored = double;
  static double Value(double stored) { return stored; }
};
struct Float32 {
  using Stored = float;
  static double Value(float stored) { return static_cast<double>(stored); }
};
struct Bfloat16 {
  using Stored = uint16_t;
  static double Value(uint16_t stored) {
    return static_cast<double>(BitsAs<float>(static_cast<uint32_t>(stored) << 16));
  }
};
struct Float16 {
  using Stored = uint16_t;
  // Moved to the place of a float's bits, a value is too small by the difference of the exponents' biases,
  // subnormal ones too. An exponent of ones becomes 2^16 or more, which no finite half is.
  static double Value(uint16_t stored) {
    const uint32_t magnitude = static_cast<uint32_t>(stored & 0x7fffu) << 13;
    const float scaled = BitsAs<float>(magnitude) * 0x1p112f;
    const uint32_t special = scaled >= 65536.0f ? 0x7f800000u : 0u;
    const uint32_t sign = static_cast<uint32_t>(stored & 0x8000u) << 16;
    return static_cast<double>(BitsAs<float>(BitsAs<uint32_t>(scaled) | special | sign));
  }
};

template <typename Type>
void Load(const char* from, size_t count, double* to) {
  typename Type::Stored stored[kBlock];
  std::memcpy(stored, from, count * sizeof(typename Type::Stored));
  for (size_t i = 0; i < count; ++i) to[i] = Type::Value(stored[i]);
}

double SumOf(const double (&lanes)[kLanes]) {
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

double LargestOf(const double (&lanes)[kLanes]) { return *std::max_element(lanes, lanes + kLanes); }

// Any elements, in any order of magnitude.
void CompareOneByOne(const double* a, const double* b, size_t count, Drift* drift) {
  for (size_t i = 0; i < count; ++i) {
    const bool finite = std::isfinite(a[i]);
    if (finite) drift->squares_first += a[i] * a[i];
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    ++drift->changed;
    if (!finite || !std::isfinite(b[i])) {
      ++drift->not_finite;
      continue;
    }
    const double apart = std::fabs(a[i] - b[i]);
    drift->largest_absolute = std::max(drift->largest_absolute, apart);
    drift->largest_relative =
        std::max(drift->largest_relative, apart / std::max(std::fabs(a[i]), std::fabs(b[i])));
    drift->squares_apart += apart * apart;
  }
}

// A whole block that is equal on both sides. Returns false, and adds nothing, unless its squares are finite.
bool CompareEqualBlock(const double* a, Drift* drift) {
  double first[kLanes] = {};
  for (size_t i = 0; i < kBlock; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) first[lane] += a[i + lane] * a[i + lane];
  }
  const double squares = SumOf(first);
  if (!std::isfinite(squares)) return false;
  drift->squares_first += squares;
  return true;
}

// A whole block. Returns false, and adds nothing, unless all its squares are finite (then all elements are).
bool CompareBlock(const double* a, const double* b, Drift* drift) {
  double first[kLanes] = {}, apart[kLanes] = {}, largest[kLanes] = {};
  uint64_t changed[kLanes] = {};
  for (size_t i = 0; i < kBlock; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double one = a[i + lane], other = b[i + lane], gap = std::fabs(one - other);
      first[lane] += one * one;
      apart[lane] += gap * gap;
      largest[lane] = largest[lane] > gap ? largest[lane] : gap;
      changed[lane] += one != other ? 1 : 0;
    }
  }
  const double squares_first = SumOf(first), squares_apart = SumOf(apart);
  if (!std::isfinite(squares_first + squares_apart)) return false;
  drift->squares_first += squares_first;
  drift->squares_apart += squares_apart;
  for (const uint64_t lane : changed) drift->changed += lane;
  drift->largest_absolute = std::max(drift->largest_absolute, LargestOf(largest));
  // A quotient is larger than the largest so far if its numerator is larger than that times its denominator:
  // after the first blocks this is rare, and division is slow.
  bool larger = false;
  const double most = drift->largest_relative;
  for (size_t i = 0; i < kBlock; ++i) {
    const double one = std::fabs(a[i]), other = std::fabs(b[i]);
    larger |= std::fabs(a[i] - b[i]) > most * (one > other ? one : other);
  }
  for (size_t i = 0; larger && i < kBlock; ++i) {
    const double scale = std::max(std::fabs(a[i]), std::fabs(b[i]));
    if (scale > 0)
      drift->largest_relative = std::max(drift->largest_relative, std::fabs(a[i] - b[i]) / scale);
  }
  return true;
}

template <typename Type>
Drift Compare(const char* left, const char* right, size_t count) {
  constexpr size_t kBytes = sizeof(typename Type::Stored);
  Drift drift;
  double a[kBlock], b[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t some = std::min(kBlock, count - at);
    Load<Type>(left + at * kBytes, some, a);
    const bool equal = std::memcmp(left + at * kBytes, right + at * kBytes, some * kBytes) == 0;
    if (equal && some == kBlock && CompareEqualBlock(a, &drift)) continue;
    Load<Type>(right + at * kBytes, some, b);
    if (some < kBlock || !CompareBlock(a, b, &drift)) CompareOneByOne(a, b, some, &drift);
  }
  return drift;
}

void SummarizeOneByOne(const double* values, size_t count, Statistics* found) {
  for (size_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) ++found->nans;
    if (!std::isfinite(values[i])) continue;
    ++found->finite;
    found->minimum = std::min(found->minimum, values[i]);
    found->maximum = std::max(found->maximum, values[i]);
    found->total += values[i];
    found->squares += values[i] * values[i];
  }
}

// A whole block. Returns false, and adds nothing, unless all its squares are finite.
bool SummarizeBlock(const double* values, Statistics* found) {
  double total[kLanes] = {}, squares[kLanes] = {}, least[kLanes], most[kLanes];
  std::copy_n(values, kLanes, least);
  std::copy_n(values, kLanes, most);
  for (size_t i = 0; i < kBlock; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      total[lane] += value;
      squares[lane] += value * value;
      least[lane] = value < least[lane] ? value : least[lane];
      most[lane] = value > most[lane] ? value : most[lane];
    }
  }
  if (!std::isfinite(SumOf(squares))) return false;
  found->finite += kBlock;
  found->total += SumOf(total);
  found->squares += SumOf(squares);
  found->minimum = std::min(found->minimum, *std::min_element(least, least + kLanes));
  found->maximum = std::max(found->maximum, LargestOf(most));
  return true;
}

template <typename Type>
Statistics Summarize(const char* data, size_t count) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Statistics found;
  found.minimum = kInfinity;
  found.maximum = -kInfinity;
  double values[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t some = std::min(kBlock, count - at);
    Load<Type>(data + at * sizeof(typename Type::Stored), some, values);
    if (some < kBlock || !SummarizeBlock(values, &found)) SummarizeOneByOne(values, some, &found);
  }
  if (found.finite == 0) found.minimum = found.maximum = 0;
  return found;
}

// Calls `function` with the type of elements of that kind.
template <typename Function>
auto Dispatch(NumberKind kind, Function function) {
  switch (kind) {
    case NumberKind::kFloat64:
      return function(Float64());
    case NumberKind::kFloat32:
      return function(Float32());
    case NumberKind::kFloat16:
      return function(Float16());
    case NumberKind::kBfloat16:
      break;
  }
  return function(Bfloat16());
}

}  // namespace

size_t ElementBytes(NumberKind kind) {
  return Dispatch(kind, [](auto type) { return sizeof(typename decltype(type)::Stored); });
}

Drift CompareNumbers(NumberKind kind, const void* left, const void* right, size_t count) {
  return Dispatch(kind, [&](auto type) {
    return Compare<decltype(type)>(static_cast<const char*>(left), static_cast<const char*>(right), count);
  });
}

Statistics SummarizeNumbers(NumberKind kind, const void* data, size_t count) {
  return Dispatch(
      kind, [&](auto type) { return Summarize<decltype(type)>(static_cast<const char*>(data), count); });
}

}  // namespace datastates
