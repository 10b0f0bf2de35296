#include "bindings/changes.h"

#include <algorithm>
#include <vector>

namespace datastates {

#if PY_VERSION_HEX >= 0x030C0000

namespace {

constexpr int kNone = -1;

bool can_watch = true;
uint64_t count = kUnknownChanges + 1;
int watcher_of_dictionaries = kNone, watcher_of_attributes = kNone;
std::vector<PyObject*> names;

// Attributes that code sets by name have interned keys: one object for each name.
bool MayMatter(PyObject* key) {
  if (key == nullptr || !PyUnicode_CheckExact(key) || PyUnicode_CHECK_INTERNED(key) == 0) return true;
  return std::find(names.begin(), names.end(), key) != names.end();
}

int OnChange(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++count;
  return 0;
}

int OnAttributeChange(PyDict_WatchEvent, PyObject*, PyObject* key, PyObject*) {
  if (MayMatter(key)) ++count;
  return 0;
}

void Watch(nanobind::handle dictionary, PyDict_WatchCallback callback, int* watcher) {
  if (!can_watch) return;
  if (*watcher == kNone) *watcher = PyDict_AddWatcher(callback);
  if (*watcher == kNone || PyDict_Watch(*watcher, dictionary.ptr()) != 0) {
    PyErr_Clear();  // an interpreter has eight watchers: others have them all
    can_watch = false;
  }
}

}  // namespace

uint64_t ChangeCount() { return can_watch ? count : kUnknownChanges; }

void WatchDictionary(nanobind::handle dictionary) { Watch(dictionary, OnChange, &watcher_of_dictionaries); }

void WatchAttributes(nanobind::handle dictionary) {
  Watch(dictionary, OnAttributeChange, &watcher_of_attributes);
}

void WatchName(nanobind::handle interned) {
  if (std::find(names.begin(), names.end(), interned.ptr()) == names.end())
    names.push_back(nanobind::borrow(interned).release().ptr());  // for ever: there are few
}

#else

uint64_t ChangeCount() { return kUnknownChanges; }
void WatchDictionary(nanobind::handle) {}
void WatchAttributes(nanobind::handle) {}
void WatchName(nanobind::handle) {}

#endif

}  // namespace datastates
