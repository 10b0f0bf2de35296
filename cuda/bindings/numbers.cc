#include "bindings/numbers.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bindings/gil.h"
#include "numbers/numbers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace datastates {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t CountOf(NumberKind kind, const Bytes& bytes) {
  if (bytes.size() % ElementBytes(kind) != 0) throw nb::value_error("expected whole elements");
  return bytes.size() / ElementBytes(kind);
}

std::tuple<uint64_t, double, double, uint64_t, double, double> Compare(NumberKind kind, const Bytes& left,
                                                                       const Bytes& right) {
  if (left.size() != right.size()) throw nb::value_error("expected as many bytes on both sides");
  const size_t count = CountOf(kind, left);
  const WithoutGil without_gil;
  const Drift drift = CompareNumbers(kind, left.data(), right.data(), count);
  return {drift.changed,    drift.largest_absolute, drift.largest_relative,
          drift.not_finite, drift.squares_apart,    drift.squares_first};
}

std::tuple<uint64_t, uint64_t, double, double, double, double> Summarize(NumberKind kind, const Bytes& data) {
  const size_t count = CountOf(kind, data);
  const WithoutGil without_gil;
  const Statistics found = SummarizeNumbers(kind, data.data(), count);
  return {found.finite, found.nans, found.minimum, found.maximum, found.total, found.squares};
}

}  // namespace

void BindNumbers(nb::module_& module) {
  nb::enum_<NumberKind>(module, "NumberKind")
      .value("FLOAT64", NumberKind::kFloat64)
      .value("FLOAT32", NumberKind::kFloat32)
      .value("FLOAT16", NumberKind::kFloat16)
      .value("BFLOAT16", NumberKind::kBfloat16);
  module.def("compare_numbers", &Compare, "kind"_a, "left"_a, "right"_a);
  module.def("summarize_numbers", &Summarize, "kind"_a, "data"_a);
}

}  // namespace datastates
