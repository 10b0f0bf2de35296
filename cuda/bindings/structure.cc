#include "bindings/structure.h"

#include <utility>

namespace nb = nanobind;

namespace datastates {
namespace {

constexpr size_t kAhead = 16;  // entries

enum Container : uint64_t { kDictionary, kSequence, kSet, kAbsent };

uint64_t Fact(Container container, size_t size) { return static_cast<uint64_t>(size) << 2 | container; }

bool HasWeakReferences(nb::handle value) { return PyType_SUPPORTS_WEAKREFS(Py_TYPE(value.ptr())); }

nb::list InternedStrings(const std::vector<std::string>& names) {
  nb::list interned;
  for (const std::string& name : names) interned.append(nb::steal(PyUnicode_InternFromString(name.c_str())));
  return interned;
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

}  // namespace

class Structure::Noting {
 public:
  explicit Noting(std::vector<Entry>* entries) : entries_(*entries) {}

  bool Container(uint64_t fact, nb::handle value) { return Add(Kind::kContainer, fact, {}, value); }
  bool Opaque(bool has_weak_references) { return Add(Kind::kOpaque, has_weak_references, {}, {}); }
  bool Set(nb::handle set) {
    return Add(Kind::kEqual, 0, nb::steal(Checked(PyFrozenSet_New(set.ptr()))), set);
  }
  bool Leaf(nb::handle value) {
    if (!HasWeakReferences(value)) return Add(Kind::kEqual, 0, nb::borrow(value), value);
    return Add(Kind::kIdentical, 0, nb::steal(Checked(PyWeakref_NewRef(value.ptr(), nullptr))), value);
  }

 private:
  static PyObject* Checked(PyObject* made) {
    if (made == nullptr) throw nb::python_error();
    return made;
  }
  bool Add(Kind kind, uint64_t fact, nb::object held, nb::handle value) {
    entries_.push_back({kind, fact, std::move(held), value.ptr()});
    return true;
  }

  std::vector<Entry>& entries_;
};

class Structure::Comparing {
 public:
  explicit Comparing(const std::vector<Entry>& entries) : entries_(entries) {}

  bool Container(uint64_t fact, nb::handle) { return HasFact(Kind::kContainer, fact); }
  bool Opaque(bool has_weak_references) { return HasFact(Kind::kOpaque, has_weak_references); }
  bool Set(nb::handle set) {
    const Entry* entry = Next(Kind::kEqual);
    return entry != nullptr && AreEqual(set, entry->held);
  }
  bool Leaf(nb::handle value) {
    if (!HasWeakReferences(value)) {
      const Entry* entry = Next(Kind::kEqual);
      return entry != nullptr && (value.is(entry->held) || AreEqual(value, entry->held));
    }
    const Entry* entry = Next(Kind::kIdentical);
    if (entry == nullptr || !RefersTo(entry->held, value)) return false;
    leaves_.append(value);
    return true;
  }

  // Whether all that was noted was seen again.
  bool is_complete() const { return at_ == entries_.size(); }
  nb::object leaves() const { return leaves_; }

 private:
  const Entry* Next(Kind kind) {
    if (at_ == entries_.size() || entries_[at_].kind != kind) return nullptr;
    // After an iteration of training, no cache holds any of this. Fetching what is freed by now does no harm.
    if (const size_t later = at_ + kAhead; later < entries_.size()) {
      __builtin_prefetch(entries_[later].address);
      __builtin_prefetch(entries_[later].held.ptr());
    }
    return &entries_[at_++];
  }
  bool HasFact(Kind kind, uint64_t fact) {
    const Entry* entry = Next(kind);
    return entry != nullptr && entry->fact == fact;
  }

  const std::vector<Entry>& entries_;
  size_t at_ = 0;
  nb::list leaves_;
};

Structure::Structure(const nb::list& owners, const nb::list& roots,
                     const std::vector<std::string>& attributes, const std::vector<std::string>& own,
                     const std::vector<std::string>& opaque)
    : attributes_(InternedStrings(attributes)),
      own_(InternedStrings(own)),
      opaque_(nb::steal(PyFrozenSet_New(InternedStrings(opaque).ptr()))) {
  Noting noting(&entries_);
  Walk(owners, roots, &noting);
}

nb::object Structure::Leaves(const nb::list& owners, const nb::list& roots) const {
  Comparing comparing(entries_);
  if (!Walk(owners, roots, &comparing) || !comparing.is_complete()) return nb::none();
  return comparing.leaves();
}

template <typename Visitor>
bool Structure::Walk(const nb::list& owners, const nb::list& roots, Visitor* visitor) const {
  for (nb::handle owner : owners)
    if (!WalkOwner(owner, visitor)) return false;
  return WalkValue(roots, visitor);
}

template <typename Visitor>
bool Structure::WalkOwner(nb::handle owner, Visitor* visitor) const {
  const nb::object values = nb::steal(PyObject_GenericGetDict(owner.ptr(), nullptr));
  if (!values.is_valid()) throw nb::python_error();
  if (!visitor->Leaf(owner.type())) return false;
  for (nb::handle name : attributes_) {
    const nb::object value = nb::borrow(PyDict_GetItemWithError(values.ptr(), name.ptr()));
    if (!value.is_valid() ? !visitor->Container(Fact(kAbsent, 0), {}) : !WalkValue(value, visitor))
      return false;
  }
  for (nb::handle name : own_)
    if (!visitor->Opaque(PyDict_Contains(values.ptr(), name.ptr()) == 1)) return false;
  return true;
}

template <typename Visitor>
bool Structure::WalkValue(nb::handle value, Visitor* visitor) const {
  PyObject* object = value.ptr();
  const Depth depth;
  if (PyDict_Check(object)) {
    const auto size = static_cast<size_t>(PyDict_GET_SIZE(object));
    if (!visitor->Container(Fact(kDictionary, size), value)) return false;
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
