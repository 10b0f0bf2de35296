// The NUMA node of a device, from sysfs, and the placement of memory and threads on it. Nothing here fails:
// with an unknown node, a kernel without NUMA or a container that forbids the calls, everything stays where
// it is. The system calls are made directly, so libnuma is not needed.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>

namespace datastates {

// CPUs by number, up to the most that Linux can be built for.
class CpuSet {
 public:
  static constexpr size_t kMostCpus = 8192;

  // Parses a list as sysfs writes it, such as "0-3,8". Returns false for anything else; the set is
  // unspecified then.
  bool Parse(const std::string& list);
  bool ReadAffinity() noexcept;  // of the calling thread
  bool SetAffinity() const noexcept;
  void Intersect(const CpuSet& other) noexcept;
  size_t Count() const noexcept { return CPU_COUNT_S(sizeof words_, words_); }

 private:
  cpu_set_t words_[kMostCpus / CPU_SETSIZE] = {};
};

struct NumaNode {
  int number = -1;  // negative: unknown; then nothing is placed
  CpuSet cpus;      // empty if sysfs does not list them
};

// Reads <sysfs>/bus/pci/devices/<bus id>/numa_node and <sysfs>/devices/system/node/node<N>/cpulist. `bus_id`
// is what CUDA writes ("0000:0A:00.0"); empty: unknown.
NumaNode NodeOfDevice(const std::string& sysfs, const std::string& bus_id);

// Makes `node` the preferred source of this memory's pages, and moves pages that are elsewhere already.
// Page-locked memory cannot move. `address` is the start of a page.
void BindMemory(void* address, size_t bytes, const NumaNode& node) noexcept;

// Restricts the calling thread to those CPUs of `node` that it may run on now. If there are none, nothing
// changes.
void BindThread(const NumaNode& node) noexcept;

}  // namespace datastates
