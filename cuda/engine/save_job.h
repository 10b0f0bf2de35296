// One rank's data file on its way to the disk: what has been staged, written and made durable.
//
// The job is a value that threads share; it starts none. Errors are values too: the first one is kept,
// everything still queued is dropped, and every wait returns.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/copier.h"
#include "engine/batch.h"
#include "engine/block.h"
#include "engine/tripwire.h"
#include "os/data_file.h"
#include "os/mutex.h"

namespace datastates {

// What a wait can be for. When the job fails, every wait ends: that for kStaged once nothing reads a source
// any more, that for kReleased as ever, the others at once.
enum class Milestone {
  kEager,     // samples and eager chunks are enqueued: on the device's stream, or copied from host memory
  kEnqueued,  // fenced chunks are enqueued, likewise
  kStaged,    // no fenced source will be read any more: it may be freed, or unmapped
  kWritten,   // the input is closed and every chunk is in the file
  kDurable,   // the footer is written and the file and its directories are synced
  kReleased,  // nothing of this job is queued or running, no source is read, no slot is held
};

// shared_from_this: the bindings take part in the ownership by it. Without, nanobind would let the
// workers own the Python object, and wait for Python's lock to drop it.
class SaveJob : public std::enable_shared_from_this<SaveJob> {
 public:
  struct Status {
    std::optional<Failure> failure;  // the first
    bool cancelled = false;
    bool direct = false;
    uint64_t bytes_planned = 0, bytes_staged = 0, bytes_written = 0;
    // Seconds since the job began; negative while it has not happened.
    double reserved_at = -1, looked_at = -1, enqueued_at = -1, staged_at = -1, written_at = -1,
           durable_at = -1;
    double waited_for_slots = 0;   // of all staging threads together
    double waited_for_memory = 0;  // the part of it in which the pool was still being made
    // Where in the file a source changed before its copy was done; torn_bytes is 0 if none did.
    uint64_t torn_at = 0, torn_bytes = 0;
  };

  SaveJob(std::string path, bool direct, bool checksums, std::shared_ptr<DeviceCopier> copier);

  // Used by the trainer's side. In a forked child, where a lock may be held for ever by a thread that is
  // not there, none of these takes one: the save has failed, every wait is over, and nothing else happens.
  bool Wait(Milestone milestone, double seconds);
  void Fail(const Failure& failure);
  void Cancel(const std::string& reason);
  Status status() const;
  bool failed() const;
  // Lets `trainer` run on only after the device copies enqueued so far: after kEager the samples and the
  // eager ones, after kEnqueued all fenced ones. Where that fails, the job fails.
  void HoldBack(CuStream trainer);
  // For how many seconds it was held back, by the device's clock and as far as that is over. Asks the driver.
  double StreamWaited();
  // One CRC-32C a block of [0, end of data); after kWritten.
  std::vector<uint32_t> BlockChecksums() const;
  // Closes and removes the file. After kReleased.
  void Remove();

  // Takes the samples of a fenced batch; returns whether the device was asked for any. What goes wrong fails
  // the job. Before anything of the batch is queued.
  bool TakeSamples(const Batch& batch, std::shared_ptr<uint8_t> device_memory);

  // Around every time in which a source is read, on the host or by copies that are enqueued. No reading
  // begins once the job has failed: false says so, and EndRead is not called then.
  bool BeginRead();
  void EndRead();

  // Used by the engine's workers.
  void PlanFirstPass(const Batch& batch);
  void KeepFirstChecksum(size_t chunk, uint32_t crc);  // the checksum of that chunk, copied before any change
  // The tripwire's second look at what is in host memory, if there is a tripwire. Before the first chunk that
  // is not eager is copied, so that nothing has changed for a good reason.
  void Look(const Batch& batch);
  // Whether the fenced chunk was staged as it was when the save began, as far as samples and rehearsal can
  // tell. If not, the job fails.
  bool Verify(const Batch& batch, size_t chunk, const uint8_t* staged);
  void CountPlanned(const Batch& batch);  // counts what is coming
  void CloseInput();
  void Open(uint64_t reserve_bytes, WriteBackend* backend, Faults* faults);
  void CountEnqueued(const Batch& batch, const Batch::Chunk& chunk);
  void CountStaged(const Batch& batch, const Batch::Chunk& chunk);
  void WriteChunk(const Batch::Chunk& chunk, const uint8_t* data);
  void EndTask();  // a chunk or task planned by Plan or Begin has left the engine
  void BeginTask();
  void WriteFooter(const uint8_t* data, uint64_t bytes, uint64_t offset);
  void CountSlotWait(double seconds, double of_it_growing);

  const std::shared_ptr<DeviceCopier>& copier() const { return copier_; }
  bool checksums() const { return checksums_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct BlockPart {
    uint64_t offset;
    uint64_t bytes;
    uint32_t crc;
  };

  // The trainer's stream waited between two events.
  struct Hold {
    std::unique_ptr<Event> begin, end;
  };

  void FailTorn(uint64_t offset, uint64_t bytes);
  double Elapsed() const { return std::chrono::duration<double>(Clock::now() - born_).count(); }
  bool Reached(Milestone milestone) const REQUIRES(mutex_);
  DataFile* file() const;

  const HomeProcess home_;
  const std::string path_;
  const bool direct_;
  const bool checksums_;
  const std::shared_ptr<DeviceCopier> copier_;
  const Clock::time_point born_ = Clock::now();
  // From TakeSamples until nothing of the job is queued; constant but for Look, which comes before every
  // chunk that it looks at.
  std::optional<Tripwire> tripwire_;

  Mutex holding_;  // apart from mutex_, under which the driver, which may make its caller wait, is not called
  std::vector<Hold> holds_ GUARDED_BY(holding_);
  double stream_waited_ GUARDED_BY(holding_) = 0;
  mutable Mutex mutex_;
  CondVar changed_;
  std::unique_ptr<DataFile> file_ GUARDED_BY(mutex_);  // the file itself is thread-safe
  std::optional<Failure> failure_ GUARDED_BY(mutex_);
  Status status_ GUARDED_BY(mutex_);
  // Chunks not yet: enqueued (eager; fenced), copied (fenced), in the file (any). Invariant: each counts
  // down to zero exactly once per planned chunk while the job has not failed.
  size_t eager_left_ GUARDED_BY(mutex_) = 0;
  size_t enqueued_left_ GUARDED_BY(mutex_) = 0;
  size_t staged_left_ GUARDED_BY(mutex_) = 0;
  size_t written_left_ GUARDED_BY(mutex_) = 0;
  size_t reads_ GUARDED_BY(mutex_) = 0;  // begun and not ended
  size_t tasks_ GUARDED_BY(mutex_) = 0;  // queued or running in the engine, failed or not
  bool input_closed_ GUARDED_BY(mutex_) = false;
  bool durable_ GUARDED_BY(mutex_) = false;
  std::vector<BlockPart> block_parts_ GUARDED_BY(mutex_);
  std::vector<uint32_t> first_checksums_
      GUARDED_BY(mutex_);  // by chunk of the fenced batch; empty: no rehearsal
};

}  // namespace datastates
