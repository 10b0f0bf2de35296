// What nested Python containers hold, object by object, to be compared with what they hold later.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace datastates {

// Notes what owners (objects with attributes) and roots (any values) hold, and says whether they still do.
// Dictionaries, lists, tuples and sets are containers; everything else is a leaf. A leaf is the same if it is
// the same object; where its type has no weak references (numbers, strings), if it is equal. Leaves are held
// weakly: none of them is kept alive, and another object at the address of a freed one is noticed.
//
// Where Python reports changes of dictionaries (3.12 and newer), those that did not change are not walked
// again, only the lists, tuples and sets in them.
class Structure {
 public:
  // Notes of each owner its class, how many attributes its __dict__ has, those of the names `attributes`, and
  // which of the names `own` there are. Of the values under the keys `opaque`, notes only whether
  // their types have weak references.
  Structure(const nanobind::list& owners, const nanobind::list& roots,
            const std::vector<std::string>& attributes, const std::vector<std::string>& own,
            const std::vector<std::string>& opaque);

  // Returns the leaves that were noted by identity, in the order of the containers, or those of them that
  // were chosen; None if anything differs.
  nanobind::object Leaves(const nanobind::list& owners, const nanobind::list& roots);

  // Lets `Leaves` return only those with these numbers among all leaves: the others need not be touched. To
  // be called once at most.
  void Choose(const std::vector<size_t>& leaves);

  // How often `Leaves` had to walk all of it.
  size_t walks() const { return walks_; }

 private:
  enum class Kind : uint8_t { kContainer, kIdentical, kEqual, kOpaque };
  struct Entry {
    Kind kind;
    uint64_t fact;          // of a container its type and size; of an opaque value, see the constructor
    nanobind::object held;  // a weak reference to an identical leaf, an equal one itself
    PyObject* address;      // where the value was when all was walked last
    size_t end;             // of a dictionary: the entry after all that it holds
  };
  struct Owner {
    nanobind::handle type;  // the weak reference that its first entry holds
    PyObject* values;       // its __dict__
  };
  class Noting;
  class Comparing;

  // Both walks call the same methods of a visitor; each returns false to end the walk.
  template <typename Visitor>
  bool WalkOwner(nanobind::handle owner, Visitor* visitor);
  template <typename Visitor>
  bool WalkValue(nanobind::handle value, Visitor* visitor);
  bool WalkUnwatched(size_t begin, size_t end, Comparing* comparing);
  bool IsUnchanged(const nanobind::list& owners, const nanobind::list& roots);

  nanobind::list attributes_, own_;  // of interned strings
  nanobind::object opaque_;          // a frozenset of them
  std::vector<Entry> entries_;       // of the owners, then of the roots
  std::vector<Owner> owners_;
  size_t roots_ = 0;               // their first entry
  std::vector<size_t> unwatched_;  // entries of lists, tuples and sets
  std::vector<PyObject*> leaves_;  // noted by identity, and chosen; they exist if nothing has changed
  std::optional<std::vector<size_t>> chosen_;
  uint64_t changes_ = 0;  // that had been reported when all was walked last
  size_t walks_ = 0;
};

}  // namespace datastates
