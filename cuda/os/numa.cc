#include "os/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <optional>

namespace datastates {
namespace {

// From <numaif.h>.
constexpr int kPreferred = 1;
constexpr unsigned kMove = 2;

constexpr int kMostNodes = 1024;  // the most that Linux can be built for
constexpr size_t kWordBits = 8 * sizeof(unsigned long);
constexpr size_t kDomainDigits = 4;  // in sysfs, at least; CUDA may write more

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Reads a number below `limit` from the front of `*text`.
std::optional<int> TakeNumber(const char** text, const char* end, int limit) {
  int value = -1;
  const auto [rest, error] = std::from_chars(*text, end, value);
  if (error != std::errc() || value < 0 || value >= limit) return std::nullopt;
  *text = rest;
  return value;
}

// Returns the name of a device's folder in sysfs; empty if `bus_id` is not a bus id, so that it never becomes
// a path.
std::string FolderName(const std::string& bus_id) {
  std::string name;
  for (const unsigned char letter : bus_id) {
    if (!std::isxdigit(letter) && letter != ':' && letter != '.') return "";
    name += static_cast<char>(std::tolower(letter));
  }
  const size_t domain = name.find(':');
  if (domain == std::string::npos || name.find("..") != std::string::npos) return "";
  const size_t spare = domain > kDomainDigits ? domain - kDomainDigits : 0;
  return name.substr(std::min(spare, name.find_first_not_of('0')));
}

}  // namespace

bool CpuSet::Parse(const std::string& list) {
  const char* at = list.data();
  const char* const end = at + list.size();
  while (at != end) {
    const auto first = TakeNumber(&at, end, kMostCpus);
    if (!first) return false;
    auto last = first;
    if (at != end && *at == '-') last = TakeNumber(&++at, end, kMostCpus);
    if (!last || *last < *first) return false;
    for (int cpu = *first; cpu <= *last; ++cpu) CPU_SET_S(cpu, sizeof words_, words_);
    if (at != end && *at++ != ',') return false;
  }
  return true;
}

bool CpuSet::ReadAffinity() noexcept { return sched_getaffinity(0, sizeof words_, words_) == 0; }

bool CpuSet::SetAffinity() const noexcept { return sched_setaffinity(0, sizeof words_, words_) == 0; }

void CpuSet::Intersect(const CpuSet& other) noexcept {
  CPU_AND_S(sizeof words_, words_, words_, other.words_);
}

NumaNode NodeOfDevice(const std::string& sysfs, const std::string& bus_id) {
  NumaNode node;
  const std::string folder = FolderName(bus_id);
  if (folder.empty()) return node;
  const std::string number = FirstLine(sysfs + "/bus/pci/devices/" + folder + "/numa_node");
  const char* at = number.data();
  const auto found = TakeNumber(&at, at + number.size(), kMostNodes);
  if (!found || at != number.data() + number.size()) return node;
  node.number = *found;
  CpuSet cpus;
  const std::string list = sysfs + "/devices/system/node/node" + number + "/cpulist";
  if (cpus.Parse(FirstLine(list))) node.cpus = cpus;
  return node;
}

void BindMemory(void* address, size_t bytes, const NumaNode& node) noexcept {
  if (node.number < 0) return;
  unsigned long nodes[kMostNodes / kWordBits] = {};
  nodes[node.number / kWordBits] = 1UL << (node.number % kWordBits);
  // The kernel reads one bit less than the count says.
  syscall(SYS_mbind, address, bytes, kPreferred, nodes, static_cast<unsigned long>(kMostNodes + 1), kMove);
}

void BindThread(const NumaNode& node) noexcept {
  if (node.number < 0) return;
  CpuSet cpus;
  if (!cpus.ReadAffinity()) return;
  cpus.Intersect(node.cpus);
  if (cpus.Count() != 0) cpus.SetAffinity();
}

}  // namespace datastates
