#include "bindings/reader.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/failure.h"
#include "bindings/freeing.h"
#include "bindings/gil.h"
#include "bindings/home.h"
#include "engine/reader.h"

using namespace nanobind::literals;

namespace datastates {
namespace {

// Path, bytes of data, checksums, whether it is read through the page cache.
using FileTuple = std::tuple<std::filesystem::path, uint64_t, nb::bytes, bool>;

std::vector<ReadFile> MakeFiles(const std::vector<FileTuple>& tuples) {
  std::vector<ReadFile> files;
  files.reserve(tuples.size());
  for (const auto& [path, data_bytes, checksums, through_cache] : tuples) {
    std::vector<uint32_t> blocks(checksums.size() / sizeof(uint32_t));
    if (!blocks.empty()) std::memcpy(blocks.data(), checksums.c_str(), blocks.size() * sizeof(uint32_t));
    files.push_back({path.string(), data_bytes, std::move(blocks), through_cache});
  }
  return files;
}

constexpr double kPatienceSeconds = 10;  // with a driver that hangs

class ReaderHandle : public AtHome<Reader> {
 public:
  explicit ReaderHandle(const Reader::Options& options)
      : AtHome("reader", std::make_shared<Reader>(options)) {}
  ~ReaderHandle() {
    if (!home_.IsHere()) return;
    const WithoutGil without_gil;
    try {
      Freeing<Reader>(std::move(object_)).Wait(kPatienceSeconds);
    } catch (const std::bad_alloc&) {
      // It was freed here.
    }
  }
};

using JobHandle = AtHome<ReadJob>;

nb::tuple ResultTuple(const JobHandle& self) {
  const ReadJob::Result result = self.get()->result();
  nb::list bad;
  for (const auto& [file, block] : result.bad_blocks) bad.append(nb::make_tuple(file, block));
  return nb::make_tuple(result.bytes_read, bad, result.failure ? ErrorOf(*result.failure) : nb::none());
}

}  // namespace

void BindReader(nb::module_& module) {
  nb::class_<JobHandle>(module, "ReadJob")
      .def(
          "wait",
          [](const JobHandle& self, double seconds) {
            const auto job = self.get();
            const WithoutGil without_gil;
            return job->Wait(seconds);
          },
          "seconds"_a)
      .def("close",
           [](const JobHandle& self) {
             const auto job = self.get();
             const WithoutGil without_gil;
             job->Close();
           })
      .def("result", &ResultTuple);
  nb::class_<ReaderHandle>(module, "Reader")
      .def(
          "__init__",
          [](ReaderHandle* self, bool direct, int threads, size_t slot_bytes, const std::string& driver,
             const std::string& faults, const std::string& sysfs) {
            new (self) ReaderHandle({direct, threads, slot_bytes, driver, faults, sysfs});
          },
          nb::kw_only(), "direct"_a, "threads"_a, "slot_bytes"_a, "driver"_a, "faults"_a, "sysfs"_a = "/sys")
      .def(
          "start",
          [](const ReaderHandle& self, const std::vector<FileTuple>& tuples, const Words& files,
             const Words& offsets, const Words& row_bytes, const Words& rows, const Words& file_steps,
             const Words& targets, const Words& target_steps, const Flags& flags, uintptr_t stream) {
            CheckLengths({files.size(), offsets.size(), row_bytes.size(), rows.size(), file_steps.size(),
                          targets.size(), target_steps.size(), flags.size()});
            const auto reader = self.get();
            std::vector<ReadSpan> spans(files.size());
            for (size_t i = 0; i < spans.size(); ++i) {
              spans[i] = {files(i),      offsets(i), row_bytes(i),    rows(i),
                          file_steps(i), targets(i), target_steps(i), (flags(i) & kDeviceFlag) != 0};
            }
            std::vector<ReadFile> sources = MakeFiles(tuples);
            const WithoutGil without_gil;
            ReadPlan plan(std::move(sources), std::move(spans), reader->options().slot_bytes);
            auto job = std::make_shared<ReadJob>(reader, std::move(plan), reinterpret_cast<CuStream>(stream));
            return std::make_unique<JobHandle>("reader", std::move(job));
          },
          nb::kw_only(), "sources"_a, "files"_a, "offsets"_a, "row_bytes"_a, "rows"_a, "file_steps"_a,
          "targets"_a, "target_steps"_a, "flags"_a, "stream"_a);
}

}  // namespace datastates
