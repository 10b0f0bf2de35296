// The arrays with which Python describes spans: element i of each belongs to span i.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>

namespace datastates {

namespace nb = nanobind;

using Words = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr uint8_t kEagerFlag = 1;
constexpr uint8_t kDeviceFlag = 2;

inline void CheckLengths(std::initializer_list<size_t> lengths) {
  for (size_t length : lengths) {
    if (length != *lengths.begin())
      throw nb::value_error("the arrays that describe spans must have the same length");
  }
}

}  // namespace datastates
