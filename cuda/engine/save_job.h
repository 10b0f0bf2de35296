// One rank's data file on its way to the disk: which of its chunks have been enqueued, staged and written,
// and whether it is durable. The counts and the waits belong here; the threads that do the work are the
// Engine's.
//
// A job is shared by threads and starts none. Errors are values: the first one is kept, everything still
// queued is dropped, and every wait returns.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/copier.h"
#include "engine/batch.h"
#include "engine/block.h"
#include "engine/block_sums.h"
#include "engine/sha256.h"
#include "engine/tripwire.h"
#include "os/data_file.h"
#include "os/mutex.h"

namespace datastates {

// What a wait can be for. To enqueue a copy means to put it on the device's stream or, from host memory, to
// make it. When the job fails, every wait ends at once, except that kStaged still waits until no source is
// being read, and kReleased is unchanged.
enum class Milestone {
  kEager,     // samples and eager chunks are enqueued
  kEnqueued,  // fenced chunks are enqueued
  kStaged,    // fenced chunks are in slots: no source of theirs is read any more; it may be freed or unmapped
  kAppended,  // chunks that were appended so far are in slots; their sources may change or be freed
  kWritten,   // the input is closed and every chunk is in the file
  kDurable,   // the footer is written, and the file and its directories are synced
  kReleased,  // nothing of this job is queued or running, no source is being read, no slot is held
};

// What becomes of staged chunks. Digests need chunks that begin at blocks.
enum class Output {
  kFile,
  kFileAndDigests,
  kDigests,  // nothing is written: no file is made, and kWritten means that every chunk has its digests
};

// shared_from_this lets the bindings share ownership. Without it, nanobind would have the worker threads own
// the Python object, and wait for the GIL to drop it.
class SaveJob : public std::enable_shared_from_this<SaveJob> {
 public:
  struct Status {
    std::optional<Failure> failure;  // the first
    bool cancelled = false;
    bool direct = false;
    uint64_t bytes_planned = 0, bytes_staged = 0, bytes_written = 0;
    // Seconds from the job's start to each event; negative before it.
    double reserved_at = -1, looked_at = -1, enqueued_at = -1, staged_at = -1, written_at = -1,
           durable_at = -1;
    double waited_for_slots = 0;   // summed over the staging threads
    double waited_for_memory = 0;  // the part of it while the pool was still growing
    // The bytes of the file whose source changed before its copy was done; torn_bytes is 0 if none did.
    uint64_t torn_at = 0, torn_bytes = 0;
  };

  SaveJob(std::string path, bool direct, bool checksums, Output output, std::shared_ptr<DeviceCopier> copier);

  // -- the trainer's thread and the finishing thread --------------------------------------------------------

  // In a forked child, where a thread that does not exist may hold a lock forever, none of these takes one:
  // there the save has failed, every wait returns, and nothing else happens.

  // Returns whether the milestone was reached within that time.
  bool Wait(Milestone milestone, double seconds);
  // These two keep the first failure. They work without memory too, with a text that says so: an exception
  // out of a thread or a destructor would end the process.
  void FailIn(const char* operation, const std::exception& error) noexcept;  // any but a Failure is described
  void Cancel(const char* reason) noexcept;
  Status status() const;
  bool failed() const;
  // Makes `trainer` wait for the device copies enqueued so far: after kEager the samples and the eager
  // chunks, after kEnqueued all fenced chunks. If that fails, the job fails.
  void HoldBack(CuStream trainer);
  // Returns the seconds for which it waited, by the device's clock; a wait still under way is not included.
  double StreamWaited();
  // Returns one CRC-32C for each block of [0, end of data). Call it after kWritten.
  std::vector<uint32_t> BlockChecksums() const;
  // Returns the SHA-256s of the blocks of [0, end of data), one after another; block 0 without the header.
  // Call it after kWritten.
  std::vector<uint8_t> BlockDigests() const;
  // Closes the file and removes it, if it still has its name. Call it after kReleased.
  void Remove();

  // Takes the samples of a fenced batch, before anything of it is queued. Returns whether copies of samples
  // were enqueued on the device. An error fails the job.
  bool TakeSamples(const Batch& batch, std::shared_ptr<uint8_t> device_memory);

  // These enclose every period in which a source is read, on the host or by enqueued copies (which may go on
  // where the driver does not let their end be known: DeviceCopier::Drain). No read begins once the job has
  // failed: BeginRead then returns false, and EndRead must not be called.
  bool BeginRead();
  void EndRead();

  // -- the engine's threads ---------------------------------------------------------------------------------

  // With the option `paranoid` every fenced chunk is copied twice. The first pass, before the trainer
  // continues, only keeps checksums; Verify compares them with the second, which is written.
  void MakeRoomForFirstPass(const Batch& batch);
  void CountFirstPass(const Batch& batch);
  void KeepFirstChecksum(size_t chunk, uint32_t crc);
  // Takes the tripwire's second look (engine/tripwire.h) at sources in host memory, if there is a tripwire.
  // It comes before the first lazy chunk is copied: until then no source may change.
  void Look(const Batch& batch);
  // Returns whether the fenced chunk was staged as it was when the save began, as far as samples and
  // checksums of the first pass show. If not, the job fails.
  bool Verify(const Batch& batch, size_t chunk, const uint8_t* staged);
  void CountPlanned(const Batch& batch);
  void CloseInput();
  void Open(uint64_t reserve_bytes, bool discard, Faults* faults);
  // Whether Open is over, or nothing is to be written.
  bool IsReadyToWrite() const;
  void CountEnqueued(const Batch& batch, const Batch::Chunk& chunk);
  void CountStaged(const Batch& batch, const Batch::Chunk& chunk);
  // Writes the chunk, or only takes its digests. `parts` are its checksums, if they have been taken.
  void WriteChunk(const Batch::Chunk& chunk, const uint8_t* data, std::vector<BlockPart> parts);
  // A task is anything of the job that is queued or running in the engine. Each planned chunk is one.
  void BeginTask();
  void EndTask();
  void WriteFooter(const uint8_t* data, uint64_t bytes, uint64_t offset);
  void CountSlotWait(double seconds, double while_growing);

  const std::shared_ptr<DeviceCopier>& copier() const { return copier_; }
  bool checksums() const { return checksums_; }
  bool writes() const { return output_ != Output::kDigests; }

 private:
  using Clock = std::chrono::steady_clock;
  // Events around a wait of the trainer's stream.
  struct Hold {
    std::unique_ptr<Event> begin, end;
  };

  template <typename Make>
  void FailWith(Make make) noexcept;
  void TakeDigests(const Batch::Chunk& chunk, const uint8_t* data);
  void FailTorn(uint64_t offset, uint64_t bytes);
  double Elapsed() const { return std::chrono::duration<double>(Clock::now() - born_).count(); }
  bool Reached(Milestone milestone) const REQUIRES(mutex_);
  DataFile* file() const;

  const HomeProcess home_;
  const std::string path_;
  const bool direct_;
  const bool checksums_;
  const Output output_;
  const std::shared_ptr<DeviceCopier> copier_;
  const Clock::time_point born_ = Clock::now();
  // Present from TakeSamples until the last task ends. Only Look changes it, before any chunk that it covers
  // is verified.
  std::optional<Tripwire> tripwire_;

  Mutex holding_;  // held while the driver is called, which may block; mutex_ never is
  std::vector<Hold> holds_ GUARDED_BY(holding_);
  double stream_waited_ GUARDED_BY(holding_) = 0;
  mutable Mutex mutex_;
  CondVar changed_;
  std::unique_ptr<DataFile> file_ GUARDED_BY(mutex_);  // the file itself is thread-safe
  std::optional<Failure> failure_ GUARDED_BY(mutex_);
  Failure spare_failure_ GUARDED_BY(mutex_){"save", "", 0, "out of memory"};  // if there is none for another
  Status status_ GUARDED_BY(mutex_);
  // Chunks that are not yet enqueued (eager ones, with those of the first pass; fenced ones), staged (fenced
  // ones; appended ones), written (all). Invariant: each counter goes down exactly once per planned chunk
  // unless the job fails.
  size_t eager_left_ GUARDED_BY(mutex_) = 0;
  size_t enqueued_left_ GUARDED_BY(mutex_) = 0;
  size_t staged_left_ GUARDED_BY(mutex_) = 0;
  size_t appended_left_ GUARDED_BY(mutex_) = 0;
  size_t written_left_ GUARDED_BY(mutex_) = 0;
  size_t reads_ GUARDED_BY(mutex_) = 0;  // begun and not ended
  size_t tasks_ GUARDED_BY(mutex_) = 0;  // queued or running in the engine, failed or not
  bool input_closed_ GUARDED_BY(mutex_) = false;
  bool durable_ GUARDED_BY(mutex_) = false;
  std::vector<BlockPart> block_parts_ GUARDED_BY(mutex_);
  std::vector<std::optional<Sha256Digest>> block_digests_ GUARDED_BY(mutex_);  // by block
  // By chunk of the fenced batch; empty without a first pass.
  std::vector<uint32_t> first_checksums_ GUARDED_BY(mutex_);
};

}  // namespace datastates
