// The Python bindings of the engine: parse, release the GIL, call. Nothing is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/exchange.h"
#include "bindings/failure.h"
#include "bindings/freeing.h"
#include "bindings/gil.h"
#include "bindings/home.h"
#include "bindings/numbers.h"
#include "bindings/reader.h"
#include "bindings/structure.h"
#include "engine/crc32c.h"
#include "engine/engine.h"
#include "engine/sha256.h"
#include "os/aligned.h"
#include "os/fork.h"

using namespace nanobind::literals;

namespace datastates {
namespace {

constexpr double kSliceSeconds = 0.1;  // of a wait, so that signals are handled in between

// The fields of Span, as arrays with one element per span.
struct SpanArrays {
  const Words &sources, &bytes, &offsets, &row_bytes, &row_steps, &storages;
  const Flags& flags;
};

Batch MakeBatch(uint64_t begin, uint64_t end, uint64_t chunk_bytes, bool fenced, const SpanArrays& arrays,
                uint64_t seed) {
  const auto& [sources, bytes, offsets, row_bytes, row_steps, storages, flags] = arrays;
  CheckLengths({sources.size(), bytes.size(), offsets.size(), row_bytes.size(), row_steps.size(),
                storages.size(), flags.size()});
  std::vector<Span> spans(sources.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    spans[i] = {sources(i),
                bytes(i),
                offsets(i),
                row_bytes(i),
                row_steps(i),
                storages(i),
                (flags(i) & kEagerFlag) != 0,
                (flags(i) & kDeviceFlag) != 0};
  }
  return Batch(begin, end, chunk_bytes, fenced, std::move(spans), seed);
}

class EngineHandle : public AtHome<Engine> {
 public:
  explicit EngineHandle(const Engine::Options& options)
      : AtHome("engine", std::make_shared<Engine>(options)) {}

  // Another thread may close the engine meanwhile: the reference keeps it.
  std::shared_ptr<Engine> engine() const {
    std::shared_ptr<Engine> engine = get();
    if (!engine) throw nb::value_error("this engine is closed");
    return engine;
  }
  // False for an engine that is closed or the parent's.
  bool is_open() const { return home_.IsHere() && object_ != nullptr; }
  // Returns whether every thread ended within that time. Threads that a hung disk or device blocks are
  // leaked, with all that they use. Handles signals while it waits; if a handler raises before the threads of
  // the engine have ended, it can be closed later.
  bool Close(double seconds) {
    if (!is_open()) return true;
    auto closing = std::move(object_);
    std::optional<Freeing<Engine>> freeing;
    const auto begin = std::chrono::steady_clock::now();
    while (!CloseWithinSlice(&closing, &freeing)) {
      if (PyErr_CheckSignals() != 0) {
        object_ = std::move(closing);
        throw nb::python_error();
      }
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() >= seconds) {
        Leak(std::move(closing));
        return false;
      }
    }
    return true;
  }

 private:
  static bool CloseWithinSlice(std::shared_ptr<Engine>* engine, std::optional<Freeing<Engine>>* freeing) {
    const WithoutGil without_gil;
    if (!*freeing) {
      if (!(*engine)->CloseWithin(kSliceSeconds)) return false;
      freeing->emplace(std::move(*engine));
    }
    return (*freeing)->Wait(kSliceSeconds);
  }
};

nb::dict PoolDict(EngineHandle& self) {
  const SlotPool::Facts pool = self.engine()->pool().facts();
  nb::dict facts;
  facts["slots"] = pool.slots;
  facts["idle"] = pool.idle;
  facts["page_locked_bytes"] = pool.page_locked_bytes;
  facts["trouble"] = pool.trouble;
  return facts;
}

nb::dict StatusDict(const SaveJob& job) {
  const SaveJob::Status status = job.status();
  nb::dict facts;
  facts["error"] = status.failure ? ErrorOf(*status.failure) : nb::none();
  facts["cancelled"] = status.cancelled;
  facts["direct"] = status.direct;
  facts["bytes_planned"] = status.bytes_planned;
  facts["bytes_staged"] = status.bytes_staged;
  facts["bytes_written"] = status.bytes_written;
  facts["reserved_at"] = status.reserved_at;
  facts["looked_at"] = status.looked_at;
  facts["enqueued_at"] = status.enqueued_at;
  facts["staged_at"] = status.staged_at;
  facts["written_at"] = status.written_at;
  facts["durable_at"] = status.durable_at;
  facts["waited_for_slots"] = status.waited_for_slots;
  facts["waited_for_memory"] = status.waited_for_memory;
  facts["torn_at"] = status.torn_at;
  facts["torn_bytes"] = status.torn_bytes;
  return facts;
}

nb::bytes BytesOf(const Sha256Digest& digest) {
  return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

void BindEngine(nb::module_& module) {
  nb::class_<EngineHandle>(module, "Engine")
      .def(
          "__init__",
          [](EngineHandle* self, size_t slot_bytes, size_t most_slots, int copy_threads, int write_threads,
             bool direct, bool checksums, uint64_t copy_limit, uint64_t write_limit,
             const std::string& driver, const std::string& faults, bool discard, bool tripwire, bool paranoid,
             const std::string& sysfs, uint64_t most_in_flight, uint64_t sample_seed) {
            new (self) EngineHandle({slot_bytes, most_slots, copy_threads, write_threads, direct, checksums,
                                     copy_limit, write_limit, driver, faults, discard, tripwire, paranoid,
                                     sysfs, most_in_flight, sample_seed});
          },
          nb::kw_only(), "slot_bytes"_a, "most_slots"_a, "copy_threads"_a, "write_threads"_a, "direct"_a,
          "checksums"_a, "copy_limit"_a, "write_limit"_a, "driver"_a, "faults"_a, "discard"_a = false,
          "tripwire"_a = true, "paranoid"_a = false, "sysfs"_a = "/sys",
          "most_in_flight"_a = uint64_t{8} << 20, "sample_seed"_a = 0)
      .def(
          "start",
          [](EngineHandle& self, const std::filesystem::path& path, uint64_t reserve_bytes, uint64_t end,
             const Words& sources, const Words& bytes, const Words& offsets, const Words& row_bytes,
             const Words& row_steps, const Words& storages, const Flags& flags, uintptr_t stream,
             double lazy_seconds, Output output) {
            const auto engine = self.engine();
            Batch batch = MakeBatch(0, end, engine->options().slot_bytes, true,
                                    {sources, bytes, offsets, row_bytes, row_steps, storages, flags},
                                    engine->NextSeed());
            const WithoutGil without_gil;
            return engine->Start(path.string(), reserve_bytes, std::move(batch), output,
                                 reinterpret_cast<CuStream>(stream), lazy_seconds);
          },
          nb::kw_only(), "path"_a, "reserve_bytes"_a, "end"_a, "sources"_a, "bytes"_a, "offsets"_a,
          "row_bytes"_a, "row_steps"_a, "storages"_a, "flags"_a, "stream"_a, "lazy_seconds"_a,
          "output"_a = Output::kFile)
      .def(
          "allow_lazy_copies",
          [](EngineHandle& self, const std::shared_ptr<SaveJob>& job, double seconds, bool hurries) {
            if (self.is_open()) self.engine()->AllowLazyCopies(*job, seconds, hurries);
          },
          "job"_a, "seconds"_a, "hurries"_a = false)
      .def(
          "append",
          [](EngineHandle& self, const std::shared_ptr<SaveJob>& job, uint64_t begin, uint64_t end,
             const Words& sources, const Words& bytes, const Words& offsets, const Words& row_bytes,
             const Words& row_steps, const Words& storages, const Flags& flags) {
            const auto engine = self.engine();
            Batch batch = MakeBatch(begin, end, engine->options().slot_bytes, false,
                                    {sources, bytes, offsets, row_bytes, row_steps, storages, flags}, 0);
            const WithoutGil without_gil;
            engine->Append(job, std::move(batch));
          },
          nb::kw_only(), "job"_a, "begin"_a, "end"_a, "sources"_a, "bytes"_a, "offsets"_a, "row_bytes"_a,
          "row_steps"_a, "storages"_a, "flags"_a)
      .def(
          "finish",
          [](EngineHandle& self, const std::shared_ptr<SaveJob>& job, nb::bytes footer, uint64_t offset) {
            self.engine()->Finish(job, std::string(footer.c_str(), footer.size()), offset);
          },
          nb::kw_only(), "job"_a, "footer"_a, "offset"_a)
      .def(
          "grow", [](EngineHandle& self, size_t slots) { self.engine()->pool().Grow(slots); }, "slots"_a)
      .def(
          "limit", [](EngineHandle& self, size_t most_slots) { self.engine()->pool().Limit(most_slots); },
          "most_slots"_a)
      .def("page_lock_pool", [](EngineHandle& self) { return self.engine()->PageLockPool(); })
      .def("pool", &PoolDict)
      .def("close", &EngineHandle::Close, "seconds"_a = std::numeric_limits<double>::infinity());
}

void BindJob(nb::module_& module) {
  nb::enum_<Milestone>(module, "Milestone")
      .value("EAGER", Milestone::kEager)
      .value("ENQUEUED", Milestone::kEnqueued)
      .value("STAGED", Milestone::kStaged)
      .value("APPENDED", Milestone::kAppended)
      .value("WRITTEN", Milestone::kWritten)
      .value("DURABLE", Milestone::kDurable)
      .value("RELEASED", Milestone::kReleased);
  nb::enum_<Output>(module, "Output")
      .value("FILE", Output::kFile)
      .value("FILE_AND_DIGESTS", Output::kFileAndDigests)
      .value("DIGESTS", Output::kDigests);
  nb::class_<SaveJob>(module, "SaveJob")
      .def(
          "wait",
          [](SaveJob& self, Milestone milestone, double seconds) {
            // A look keeps the GIL: another thread could hold it for milliseconds.
            if (seconds <= 0) return self.Wait(milestone, 0);
            const WithoutGil without_gil;
            return self.Wait(milestone, seconds);
          },
          "milestone"_a, "seconds"_a)
      .def("close_input", &SaveJob::CloseInput)
      .def(
          "hold_back",
          [](SaveJob& self, uintptr_t stream) { self.HoldBack(reinterpret_cast<CuStream>(stream)); },
          "stream"_a, nb::call_guard<WithoutGil>())
      .def("stream_waited", &SaveJob::StreamWaited, nb::call_guard<WithoutGil>())
      .def("cancel", &SaveJob::Cancel, "reason"_a)
      .def("remove", &SaveJob::Remove, nb::call_guard<WithoutGil>())
      .def("status", &StatusDict)
      .def("block_digests",
           [](const SaveJob& self) {
             const std::vector<uint8_t> digests = self.BlockDigests();
             return nb::bytes(reinterpret_cast<const char*>(digests.data()), digests.size());
           })
      .def("block_checksums", [](const SaveJob& self) {
        const std::vector<uint32_t> blocks = self.BlockChecksums();
        return nb::bytes(reinterpret_cast<const char*>(blocks.data()), blocks.size() * sizeof(uint32_t));
      });
}

}  // namespace
}  // namespace datastates

NB_MODULE(_native, module) {
  using namespace datastates;
  nb::set_leak_warnings(false);  // a forked child leaks its parent's engine on purpose
  BindFailure(module);
  BindJob(module);
  BindEngine(module);
  BindReader(module);
  BindNumbers(module);
  module.def("describe_tensors", &DescribeTensors, "api"_a, "tensors"_a, "is_neg"_a, "storage_of"_a.none());
  module.def("locate_tensors", &LocateTensors, "api"_a, "tensors"_a, "types"_a, "description"_a, "known"_a,
             "is_neg"_a, "storage_of"_a);
  module.def("measure_storages", &MeasureStorages, "storages"_a, "address_of"_a);
  nb::class_<Structure>(module, "Structure")
      .def(nb::init<const nb::list&, const nb::list&, const std::vector<std::string>&,
                    const std::vector<std::string>&, const std::vector<std::string>&>(),
           "owners"_a, "roots"_a, nb::kw_only(), "attributes"_a, "own"_a, "opaque"_a)
      .def("leaves", &Structure::Leaves, "owners"_a, "roots"_a)
      .def("choose", &Structure::Choose, "leaves"_a)
      .def_prop_ro("walks", &Structure::walks);
  module.def(
      "crc32c", [](nb::bytes data, uint32_t crc) { return Crc32c(crc, data.c_str(), data.size()); }, "data"_a,
      "crc"_a = 0);
  module.def(
      "crc32c_by_tables",
      [](nb::bytes data, uint32_t crc) { return Crc32cByTables(crc, data.c_str(), data.size()); }, "data"_a,
      "crc"_a = 0);
  module.def("sha256", [](nb::bytes data) { return BytesOf(Sha256(data.c_str(), data.size())); }, "data"_a);
  module.def(
      "sha256_portable", [](nb::bytes data) { return BytesOf(Sha256Portable(data.c_str(), data.size())); },
      "data"_a);
  module.def("crc32c_combine", &Crc32cCombine, "a"_a, "b"_a, "bytes_of_b"_a);
  module.def("close_in_forked_child", &CloseInForkedChild, "descriptor"_a);
  module.def("forget_descriptor", &ForgetDescriptor, "descriptor"_a);
  module.attr("BLOCK_BYTES") = kBlockBytes;
  module.attr("ALIGNMENT") = kAlignment;
  module.attr("EAGER_FLAG") = kEagerFlag;
  module.attr("DEVICE_FLAG") = kDeviceFlag;
}
