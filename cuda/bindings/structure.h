// What nested Python containers hold, object by object, to be compared with what they hold later.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

namespace datastates {

// Notes what owners (objects with attributes) and roots (any values) hold, and says whether they still do.
// Dictionaries, lists, tuples and sets are containers; everything else is a leaf. A leaf is the same if it is
// the same object; where its type has no weak references (numbers, strings), if it is equal. Leaves are held
// weakly: none of them is kept alive, and another object at the address of a freed one is noticed.
class Structure {
 public:
  // Notes of each owner its class, its attributes of the names `attributes`, as far as its __dict__ has them,
  // and which of the names `own` its __dict__ has. Of the values under the keys `opaque`, notes only whether
  // their types have weak references.
  Structure(const nanobind::list& owners, const nanobind::list& roots,
            const std::vector<std::string>& attributes, const std::vector<std::string>& own,
            const std::vector<std::string>& opaque);

  // Returns the leaves that were noted by identity, in the order of the containers; None if anything differs.
  nanobind::object Leaves(const nanobind::list& owners, const nanobind::list& roots) const;

 private:
  enum class Kind : uint8_t { kContainer, kIdentical, kEqual, kOpaque };
  struct Entry {
    Kind kind;
    uint64_t fact;          // of a container its type and size; of an opaque value, see the constructor
    nanobind::object held;  // a weak reference to an identical leaf, an equal one itself
    const void* address;    // where the value was: a hint of what the next walk will read
  };
  class Noting;
  class Comparing;

  // Both walks call the same methods of a visitor; each returns false to end the walk.
  template <typename Visitor>
  bool Walk(const nanobind::list& owners, const nanobind::list& roots, Visitor* visitor) const;
  template <typename Visitor>
  bool WalkOwner(nanobind::handle owner, Visitor* visitor) const;
  template <typename Visitor>
  bool WalkValue(nanobind::handle value, Visitor* visitor) const;

  nanobind::list attributes_, own_;  // of interned strings
  nanobind::object opaque_;          // a frozenset of them
  std::vector<Entry> entries_;
};

}  // namespace datastates
