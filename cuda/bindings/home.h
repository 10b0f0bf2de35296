// Objects of Python whose threads exist only in the process that created them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/gil.h"
#include "os/fork.h"

namespace datastates {

namespace nb = nanobind;

// Owns such an object: a forked child leaks it, never joins.
template <typename Object>
class AtHome {
 public:
  // `name` is what errors call the object.
  AtHome(const char* name, std::shared_ptr<Object> object) : name_(name), object_(std::move(object)) {}
  ~AtHome() {
    if (!home_.IsHere()) {
      Leak(std::move(object_));
    } else {
      const WithoutGil without_gil;
      object_.reset();
    }
  }
  AtHome(const AtHome&) = delete;
  AtHome& operator=(const AtHome&) = delete;

  // Every call holds the reference while it runs without the GIL.
  const std::shared_ptr<Object>& get() const {
    if (home_.IsHere()) return object_;
    const std::string text = " belongs to the parent of this process; a forked child cannot use it";
    throw nb::value_error(("this " + std::string(name_) + text).c_str());
  }

 protected:
  static void Leak(std::shared_ptr<Object> object) {
    static_cast<void>(new std::shared_ptr<Object>(std::move(object)));
  }

  const HomeProcess home_;
  const char* const name_;
  std::shared_ptr<Object> object_;
};

}  // namespace datastates
