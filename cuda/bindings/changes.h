// Reports of changed dictionaries, which Python 3.12 and newer can be asked for (of 3.13, not all releases).
//
// One counter serves all watched dictionaries. As long as it is unchanged, each of them still exists and has
// the same objects in the same order. The GIL must be held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace datastates {

constexpr uint64_t kUnknownChanges = 0;

// Increases with every change that may matter; kUnknownChanges, forever, where Python does not report them.
uint64_t ChangeCount();

// Watches a dictionary, as long as it exists: counts every change.
void WatchDictionary(nanobind::handle dictionary);

// Watches the __dict__ of an object: counts new and removed attributes, and changes of those with the names
// that were passed to `WatchName`.
void WatchAttributes(nanobind::handle dictionary);
void WatchName(nanobind::handle interned);

}  // namespace datastates
