#include "bindings/structure.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "bindings/changes.h"

namespace nb = nanobind;

namespace datastates {
namespace {

constexpr size_t kAhead = 16;  // entries

enum Container : uint64_t { kDictionary, kSequence, kSet, kAbsent };

uint64_t Fact(Container container, size_t size) { return static_cast<uint64_t>(size) << 2 | container; }

uint64_t SizeOf(nb::handle dictionary) {
  return Fact(kDictionary, static_cast<size_t>(PyDict_GET_SIZE(dictionary.ptr())));
}

bool HasWeakReferences(nb::handle value) { return PyType_SUPPORTS_WEAKREFS(Py_TYPE(value.ptr())); }

PyObject* Checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return made;
}

nb::list InternedStrings(const std::vector<std::string>& names) {
  nb::list interned;
  for (const std::string& name : names) {
    interned.append(nb::steal(Checked(PyUnicode_InternFromString(name.c_str()))));
  }
  return interned;
}

nb::object DictionaryOf(nb::handle owner) {
  return nb::steal(Checked(PyObject_GenericGetDict(owner.ptr(), nullptr)));
}

// Returns whether a weak reference is one to `value`. Leaves no exception behind.
bool RefersTo(nb::handle reference, nb::handle value) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference.ptr(), &found) < 0) PyErr_Clear();
  const bool refers = found == value.ptr();
  Py_XDECREF(found);
  return refers;
#else
  return PyWeakref_GetObject(reference.ptr()) == value.ptr();
#endif
}

// Forgets an exception that a comparison raised; passes on interrupts and the like.
void ForgetException() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
  PyErr_Clear();
}

// Returns whether two values are equal. One that cannot be compared is not. Leaves no exception behind.
bool AreEqual(nb::handle a, nb::handle b) {
  const int equal = Py_TYPE(a.ptr()) == Py_TYPE(b.ptr()) || PyAnySet_Check(a.ptr())
                        ? PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ)
                        : 0;
  if (equal < 0) ForgetException();
  return equal == 1;
}

// Guards the stack against containers that hold themselves: raises RecursionError.
class Depth {
 public:
  Depth() {
    if (Py_EnterRecursiveCall(" in a survey of containers") != 0) throw nb::python_error();
  }
  ~Depth() { Py_LeaveRecursiveCall(); }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;
};

// Whether to compare a value runs no code in Python, which might free leaves that were seen already.
bool IsPlain(nb::handle value) {
  PyObject* object = value.ptr();
  return object == Py_None || PyLong_CheckExact(object) || PyUnicode_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyBytes_CheckExact(object) || PyBool_Check(object);
}

bool HasPlainItems(nb::handle set) {
  const nb::object items = nb::steal(PySequence_List(set.ptr()));
  if (!items.is_valid()) throw nb::python_error();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(items.ptr()); ++at)
    if (!IsPlain(PyList_GET_ITEM(items.ptr(), at))) return false;
  return true;
}

}  // namespace

class Structure::Noting {
 public:
  explicit Noting(Structure* structure) : structure_(*structure), entries_(structure->entries_) {}

  bool Owner(nb::handle owner, nb::handle values) {
    WatchAttributes(values);
    const size_t first = entries_.size();
    if (!Leaf(owner.type())) return false;
    structure_.owners_.push_back({entries_[first].held, values.ptr()});
    return Add(Kind::kContainer, SizeOf(values), {}, {});
  }
  bool Container(uint64_t fact, nb::handle value) {
    if (PyDict_Check(value.ptr()))
      WatchDictionary(value);
    else
      structure_.unwatched_.push_back(entries_.size());
    return Add(Kind::kContainer, fact, {}, value);
  }
  bool Absent() { return Add(Kind::kContainer, Fact(kAbsent, 0), {}, {}); }
  size_t position() const { return entries_.size(); }
  void End(size_t container) { entries_[container].end = entries_.size(); }
  bool Opaque(bool has_weak_references) { return Add(Kind::kOpaque, has_weak_references, {}, {}); }
  bool Set(nb::handle set) {
    return Add(Kind::kEqual, 0, nb::steal(Checked(PyFrozenSet_New(set.ptr()))), set);
  }
  bool Leaf(nb::handle value) {
    if (!HasWeakReferences(value)) return Add(Kind::kEqual, 0, nb::borrow(value), value);
    structure_.leaves_.push_back(value.ptr());
    return Add(Kind::kIdentical, 0, nb::steal(Checked(PyWeakref_NewRef(value.ptr(), nullptr))), value);
  }

 private:
  bool Add(Kind kind, uint64_t fact, nb::object held, nb::handle value) {
    entries_.push_back({kind, fact, std::move(held), value.ptr(), entries_.size() + 1});
    return true;
  }

  Structure& structure_;
  std::vector<Entry>& entries_;
};

// With `trusts_watches`, what a watched dictionary holds is not looked at again, and what code in Python
// would have to compare is taken for changed; else the dictionaries that are found are watched from now on.
class Structure::Comparing {
 public:
  Comparing(Structure* structure, bool trusts_watches)
      : structure_(*structure), entries_(structure->entries_), trusts_watches_(trusts_watches) {}

  bool Owner(nb::handle owner, nb::handle values) {
    if (owner_ == structure_.owners_.size()) return false;
    WatchAttributes(values);
    structure_.owners_[owner_++].values = values.ptr();
    if (!Leaf(owner.type())) return false;
    const Entry* entry = Next(Kind::kContainer);
    return entry != nullptr && entry->fact == SizeOf(values);
  }
  bool Container(uint64_t fact, nb::handle value) {
    Entry* entry = Next(Kind::kContainer);
    if (entry == nullptr || entry->fact != fact) return false;
    if (!trusts_watches_) {
      entry->address = value.ptr();
      if (PyDict_Check(value.ptr())) WatchDictionary(value);
    }
    knows_ = trusts_watches_ && entry->address == value.ptr();
    return true;
  }
  bool Absent() {
    const Entry* entry = Next(Kind::kContainer);
    return entry != nullptr && entry->fact == Fact(kAbsent, 0);
  }
  size_t position() const { return at_; }
  void set_position(size_t at) { at_ = at; }
  // Whether all that the container holds is what it was, but for what is not watched in it.
  bool knows() const { return knows_; }
  void End(size_t) {}
  bool Opaque(bool has_weak_references) {
    const Entry* entry = Next(Kind::kOpaque);
    return entry != nullptr && entry->fact == has_weak_references;
  }
  bool Set(nb::handle set) {
    const Entry* entry = Next(Kind::kEqual);
    return entry != nullptr && (!trusts_watches_ || HasPlainItems(set)) && AreEqual(set, entry->held);
  }
  bool Leaf(nb::handle value) {
    if (!HasWeakReferences(value)) {
      const Entry* entry = Next(Kind::kEqual);
      if (entry == nullptr) return false;
      if (value.is(entry->held)) return true;
      if (trusts_watches_ && !(IsPlain(value) && IsPlain(entry->held))) return false;
      return AreEqual(value, entry->held);
    }
    const Entry* entry = Next(Kind::kIdentical);
    if (entry == nullptr || !RefersTo(entry->held, value)) return false;
    if (!trusts_watches_) leaves_.append(value);
    return true;
  }

  // Whether all that was noted was seen again.
  bool is_complete() const { return at_ == entries_.size() && owner_ == structure_.owners_.size(); }
  const nb::list& leaves() const { return leaves_; }

 private:
  Entry* Next(Kind kind) {
    if (at_ == entries_.size() || entries_[at_].kind != kind) return nullptr;
    // After an iteration of training, no cache holds any of this. Fetching what is freed by now does no harm.
    if (const size_t later = at_ + kAhead; later < entries_.size()) {
      __builtin_prefetch(entries_[later].address);
      __builtin_prefetch(entries_[later].held.ptr());
    }
    return &entries_[at_++];
  }

  Structure& structure_;
  std::vector<Entry>& entries_;
  const bool trusts_watches_;
  bool knows_ = false;
  size_t at_ = 0, owner_ = 0;
  nb::list leaves_;
};

Structure::Structure(const nb::list& owners, const nb::list& roots,
                     const std::vector<std::string>& attributes, const std::vector<std::string>& own,
                     const std::vector<std::string>& opaque)
    : attributes_(InternedStrings(attributes)),
      own_(InternedStrings(own)),
      opaque_(nb::steal(Checked(PyFrozenSet_New(InternedStrings(opaque).ptr())))) {
  for (nb::handle name : attributes_) WatchName(name);
  for (nb::handle name : own_) WatchName(name);
  const uint64_t changes = ChangeCount();
  Noting noting(this);
  for (nb::handle owner : owners) WalkOwner(owner, &noting);
  roots_ = entries_.size();
  WalkValue(roots, &noting);
  changes_ = changes;
}

nb::object Structure::Leaves(const nb::list& owners, const nb::list& roots) {
  if (IsUnchanged(owners, roots)) {
    nb::list leaves;
    for (PyObject* leaf : leaves_) leaves.append(nb::handle(leaf));
    return leaves;
  }
  ++walks_;
  changes_ = kUnknownChanges;
  const uint64_t changes = ChangeCount();
  Comparing comparing(this, false);
  for (nb::handle owner : owners)
    if (!WalkOwner(owner, &comparing)) return nb::none();
  if (!WalkValue(roots, &comparing) || !comparing.is_complete()) return nb::none();
  changes_ = changes;
  if (!chosen_) return comparing.leaves();
  nb::list chosen;
  for (size_t leaf : *chosen_) chosen.append(comparing.leaves()[leaf]);
  return chosen;
}

void Structure::Choose(const std::vector<size_t>& leaves) {
  std::vector<PyObject*> chosen;
  for (size_t leaf : leaves) {
    if (leaf >= leaves_.size()) throw nb::index_error("there is no leaf with this number");
    chosen.push_back(leaves_[leaf]);
  }
  leaves_ = std::move(chosen);
  chosen_ = leaves;
}

// Returns false also where that cannot be said without a walk.
bool Structure::IsUnchanged(const nb::list& owners, const nb::list& roots) {
  if (changes_ == kUnknownChanges || changes_ != ChangeCount() || owners.size() != owners_.size())
    return false;
  for (size_t i = 0; i < owners_.size(); ++i) {
    const nb::handle owner = owners[i];
    if (DictionaryOf(owner).ptr() != owners_[i].values || !RefersTo(owners_[i].type, owner.type()))
      return false;
  }
  Comparing comparing(this, true);
  if (!WalkUnwatched(0, roots_, &comparing) || !WalkValue(roots, &comparing)) return false;
  // Comparing values may run code that changes something.
  return comparing.position() == entries_.size() && changes_ == ChangeCount();
}

// Walks all that the entries from `begin` to `end` have of containers that are not watched.
bool Structure::WalkUnwatched(size_t begin, size_t end, Comparing* comparing) {
  comparing->set_position(begin);
  for (auto at = std::lower_bound(unwatched_.begin(), unwatched_.end(), begin);
       at != unwatched_.end() && *at < end; ++at) {
    if (*at < comparing->position()) continue;    // within the one before it
    if (changes_ != ChangeCount()) return false;  // comparing values may run code: is it still there?
    const nb::object container = nb::borrow(entries_[*at].address);
    comparing->set_position(*at);
    if (!WalkValue(container, comparing)) return false;
  }
  comparing->set_position(end);
  return true;
}

template <typename Visitor>
bool Structure::WalkOwner(nb::handle owner, Visitor* visitor) {
  const nb::object values = DictionaryOf(owner);
  if (!visitor->Owner(owner, values)) return false;
  for (nb::handle name : attributes_) {
    const nb::object value = nb::borrow(PyDict_GetItemWithError(values.ptr(), name.ptr()));
    if (!value.is_valid() && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!value.is_valid() ? !visitor->Absent() : !WalkValue(value, visitor)) return false;
  }
  for (nb::handle name : own_) {
    const int contains = PyDict_Contains(values.ptr(), name.ptr());
    if (contains < 0) throw nb::python_error();
    if (!visitor->Opaque(contains == 1)) return false;
  }
  return true;
}

template <typename Visitor>
bool Structure::WalkValue(nb::handle value, Visitor* visitor) {
  PyObject* object = value.ptr();
  const Depth depth;
  const size_t container = visitor->position();
  if (PyDict_Check(object)) {
    if (!visitor->Container(SizeOf(value), value)) return false;
    if constexpr (std::is_same_v<Visitor, Comparing>)
      if (visitor->knows()) return WalkUnwatched(container + 1, entries_[container].end, visitor);
    PyObject *key = nullptr, *item = nullptr;
    // Comparing values may run code that changes the dictionary: then the next step may miss items, and the
    // count of entries differs.
    for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &item);) {
      const nb::object held_key = nb::borrow(key), held_item = nb::borrow(item);
      if (!visitor->Leaf(held_key)) return false;
      const bool is_opaque = PyUnicode_Check(key) && PySet_Contains(opaque_.ptr(), key) == 1;
      if (is_opaque ? !visitor->Opaque(HasWeakReferences(item)) : !WalkValue(held_item, visitor))
        return false;
    }
    visitor->End(container);
    return true;
  }
  if (PyList_Check(object) || PyTuple_Check(object)) {
    if (!visitor->Container(Fact(kSequence, static_cast<size_t>(PySequence_Fast_GET_SIZE(object))), value))
      return false;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(object); ++at)
      if (!WalkValue(nb::borrow(PySequence_Fast_GET_ITEM(object, at)), visitor)) return false;
    return true;
  }
  if (PyAnySet_Check(object)) {
    const auto size = static_cast<size_t>(PySet_GET_SIZE(object));
    return visitor->Container(Fact(kSet, size), value) && (size == 0 || visitor->Set(value));
  }
  return visitor->Leaf(value);
}

}  // namespace datastates
