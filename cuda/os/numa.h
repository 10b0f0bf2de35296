// The NUMA node of a device, from sysfs, and wishes about memory and threads that follow from it. Nothing
// here fails: a node that is unknown, a kernel without NUMA, or a container that forbids the calls leave all
// as it was. The system calls are made directly, so that no libnuma is needed.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>

namespace datastates {

// CPUs by number, up to the most that Linux can be built for.
class CpuSet {
 public:
  static constexpr size_t kMostCpus = 8192;

  // Reads a list as sysfs writes it, such as "0-3,8". False for anything else; the set is then unspecified.
  bool Parse(const std::string& list);
  bool ReadAffinity() noexcept;  // of the calling thread
  bool SetAffinity() const noexcept;
  void Intersect(const CpuSet& other) noexcept;
  size_t Count() const noexcept { return CPU_COUNT_S(sizeof words_, words_); }

 private:
  cpu_set_t words_[kMostCpus / CPU_SETSIZE] = {};
};

struct NumaNode {
  int number = -1;  // negative: unknown, and the node stands for no wish at all
  CpuSet cpus;      // empty where sysfs does not say
};

// Reads <sysfs>/bus/pci/devices/<bus id>/numa_node and <sysfs>/devices/system/node/node<N>/cpulist. `bus_id`
// is what CUDA writes ("0000:0A:00.0"); empty: unknown.
NumaNode NodeOfDevice(const std::string& sysfs, const std::string& bus_id);

// Has pages of this memory come from `node` while it has some, and moves those that lie elsewhere already.
// Page-locked memory cannot move. `address` is the start of a page.
void BindMemory(void* address, size_t bytes, const NumaNode& node) noexcept;

// Lets the calling thread run on those CPUs of `node` only that it may run on now. Where there are none,
// nothing changes.
void BindThread(const NumaNode& node) noexcept;

}  // namespace datastates
