#include "bindings/changes.h"

#include <nanobind/eval.h>

#include <unordered_set>

namespace datastates {

#if PY_VERSION_HEX >= 0x030C0000

namespace {

constexpr int kNone = -1;

bool can_watch = true;
uint64_t count = kUnknownChanges + 1;
int watcher_of_dictionaries = kNone, watcher_of_attributes = kNone;
std::unordered_set<PyObject*> names;

// Attributes that code sets by name have interned keys: one object for each name.
bool MayMatter(PyObject* key) {
  if (key == nullptr || !PyUnicode_CheckExact(key) || PyUnicode_CHECK_INTERNED(key) == 0) return true;
  return names.count(key) != 0;
}

int OnChange(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++count;
  return 0;
}

int OnAttributeChange(PyDict_WatchEvent event, PyObject*, PyObject* key, PyObject*) {
  if (event != PyDict_EVENT_MODIFIED || MayMatter(key)) ++count;
  return 0;
}

bool Add(PyDict_WatchCallback callback, int* watcher) {
  if (*watcher == kNone) *watcher = PyDict_AddWatcher(callback);
  return *watcher != kNone;
}

// Python 3.13.0 does not report what is assigned to an attribute whose value is within the object
// (python/cpython#125608).
bool ReportsAttributes() {
  const uint64_t begin = count;
  nanobind::dict globals;
  nanobind::exec(
      "class Probe:\n"
      "    pass\n"
      "probe = Probe()\n"
      "probe.old = probe.new = None\n"
      "del probe.new\n"
      "attributes = probe.__dict__\n"
      "def assign(times):\n"
      "    probe.new = 0\n"
      "    for each in range(times):\n"
      "        probe.old = each\n",
      globals);
  constexpr uint64_t kTimes = 1000;  // the interpreter specializes what runs often
  const nanobind::object attributes = globals["attributes"], assign = globals["assign"];
  if (PyDict_Watch(watcher_of_dictionaries, attributes.ptr()) != 0) throw nanobind::python_error();
  assign(kTimes);
  const bool reports_all = count - begin == kTimes + 1;
  PyDict_Unwatch(watcher_of_dictionaries, attributes.ptr());
  globals.clear();  // the function refers to them
  count = begin;    // nothing that is watched has changed
  return reports_all;
}

bool BeginWatching() {
  try {
    return Add(OnChange, &watcher_of_dictionaries) && Add(OnAttributeChange, &watcher_of_attributes) &&
           ReportsAttributes();
  } catch (nanobind::python_error&) {
    return false;
  }
}

void Watch(nanobind::handle dictionary, const int* watcher) {
  if (!can_watch || PyDict_Watch(*watcher, dictionary.ptr()) != 0) {
    PyErr_Clear();  // an interpreter has eight watchers: others have them all
    can_watch = false;
  }
}

}  // namespace

uint64_t ChangeCount() {
  if (watcher_of_dictionaries == kNone) can_watch = can_watch && BeginWatching();
  return can_watch ? count : kUnknownChanges;
}

void WatchDictionary(nanobind::handle dictionary) { Watch(dictionary, &watcher_of_dictionaries); }

void WatchAttributes(nanobind::handle dictionary) { Watch(dictionary, &watcher_of_attributes); }

void WatchName(nanobind::handle interned) {
  if (names.insert(interned.ptr()).second) interned.inc_ref();  // forever: a program has some hundreds
}

#else

uint64_t ChangeCount() { return kUnknownChanges; }
void WatchDictionary(nanobind::handle) {}
void WatchAttributes(nanobind::handle) {}
void WatchName(nanobind::handle) {}

#endif

}  // namespace datastates
