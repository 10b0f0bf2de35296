#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

void BindNumbers(nanobind::module_& module);

}  // namespace datastates
