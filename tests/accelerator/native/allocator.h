// A caching allocator with the sizes, the splitting and the bookkeeping of CUDA's.
//
// Blocks belong to the stream on which they were asked for, and are given out again on it alone. Freed memory becomes NaN
// in the order of its stream, as if its next owner had written there: poisoned at the host's time it would give false
// alarms, since what the stream has still to do may use it rightly.
//
// Source of the sizes: torch's c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize and its neighbours). Not here: expandable
// segments, private pools, garbage collection by fraction, rounding to powers of two.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <set>

#include "streams.h"

namespace late {

struct Block {
  int device;
  int64_t stream;
  size_t offset, nbytes;
  bool is_large;
  size_t asked = 0;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  bool is_free = false;
  std::set<int64_t> used_on;  // streams named by record_stream
  void* face() const { return span(device).face + offset; }
  void* back() const { return span(device).back + offset; }
};

class Pool {  // of one device
 public:
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t limit_bytes = kTotalBytes;

  explicit Pool(int device) : device_(device) { holes_[4096] = kSpanBytes - 4096; }  // no tensor begins at the face itself

  Block* take(size_t asked) {
    settle(/*waits=*/false);
    size_t nbytes = std::max(kMinBlock, round(asked, kMinBlock));
    bool is_large = nbytes > kSmallMost;
    Block* block = fit(nbytes, is_large);
    if (!block) block = segment(nbytes, is_large);
    if (!block) {
      ++stats.num_alloc_retries;
      settle(/*waits=*/true);
      block = fit(nbytes, is_large);
      if (!block) {
        release();
        block = segment(nbytes, is_large);
      }
    }
    if (!block) {
      ++stats.num_ooms;
      C10_THROW_ERROR(OutOfMemoryError,
                      c10::str("late device out of memory. Tried to allocate ", asked, " bytes: ", current(stats.allocated_bytes), " allocated, ",
                               current(stats.reserved_bytes), " reserved, limit ", limit_bytes, "."));
    }
    size_t rest = block->nbytes - nbytes;
    if (is_large ? rest > kSmallMost : rest >= kMinBlock) cut(block, nbytes);
    block->asked = asked;
    live_[block->offset] = block;
    count(*block, stats.allocated_bytes, block->nbytes);
    count(*block, stats.active_bytes, block->nbytes);
    count(*block, stats.requested_bytes, asked);
    count(*block, stats.allocation, 1);
    count(*block, stats.active, 1);
    return block;
  }

  void free(size_t offset) {
    auto at = live_.find(offset);
    TORCH_INTERNAL_ASSERT(at != live_.end(), "late: freed twice");
    Block* block = at->second;
    live_.erase(at);
    count(*block, stats.allocated_bytes, -int64_t(block->nbytes));
    count(*block, stats.requested_bytes, -int64_t(block->asked));
    count(*block, stats.allocation, -1);
    Waiting waiting{block, {}};
    for (int64_t id : block->used_on)
      if (id != block->stream) {
        auto& stream = Streams::all().at(device_, id);
        waiting.until.emplace_back();
        waiting.until.back().record(stream);
      }
    if (!waiting.until.empty()) {
      waiting_.push_back(std::move(waiting));
    } else {
      give_back(block);
    }
  }

  void record(size_t offset, int64_t stream) {
    auto at = live_.find(offset);
    if (at != live_.end()) at->second->used_on.insert(stream);
  }

  // Segments that nobody uses go back, as torch.accelerator.empty_cache() does it.
  void release() {
    settle(/*waits=*/true);
    for (auto* free : {&small_, &large_})
      for (auto it = free->begin(); it != free->end();) {
        Block* block = *it;
        if (block->before || block->after) {
          ++it;
          continue;
        }
        it = free->erase(it);
        Streams::all().synchronize(Streams::all().at(device_, block->stream));  // as cudaFree does
        madvise(block->back(), block->nbytes, MADV_DONTNEED);
        count(*block, stats.reserved_bytes, -int64_t(block->nbytes));
        count(*block, stats.segment, -1);
        add_hole(block->offset, block->nbytes);
        delete block;
      }
  }

 private:
  static constexpr size_t kMinBlock = 512, kSmallMost = 1 << 20, kSmallSegment = 2 << 20;
  static constexpr size_t kLargeSegment = 20 << 20, kLargeAlone = 10 << 20, kLargeRounding = 2 << 20;

  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->stream, a->nbytes, a->offset) < std::tie(b->stream, b->nbytes, b->offset);
    }
  };
  using Free = std::set<Block*, BySize>;
  struct Waiting {
    Block* block;
    std::vector<Event> until;
  };

  static size_t round(size_t n, size_t to) { return (n + to - 1) / to * to; }
  static size_t current(const c10::CachingAllocator::StatArray& stat) { return stat[0].current; }
  Free& free_of(const Block& block) { return block.is_large ? large_ : small_; }
  static void count(const Block& block, c10::CachingAllocator::StatArray& stat, int64_t by) {
    for (size_t kind : {size_t(0), size_t(block.is_large ? 2 : 1)}) by >= 0 ? stat[kind].increase(by) : stat[kind].decrease(-by);
  }

  Block* fit(size_t nbytes, bool is_large) {
    auto& free = is_large ? large_ : small_;
    Block key{device_, t_stream[device_], 0, nbytes, is_large};
    auto it = free.lower_bound(&key);
    if (it == free.end() || (*it)->stream != key.stream) return nullptr;
    Block* block = *it;
    free.erase(it);
    block->is_free = false;
    return block;
  }

  Block* segment(size_t nbytes, bool is_large) {
    size_t whole = !is_large ? kSmallSegment : nbytes < kLargeAlone ? kLargeSegment : round(nbytes, kLargeRounding);
    if (current(stats.reserved_bytes) + whole > std::min(limit_bytes, kTotalBytes)) return nullptr;
    for (auto& [offset, room] : holes_) {
      if (room < whole) continue;
      auto* block = new Block{device_, t_stream[device_], offset, whole, is_large};
      if (room > whole) holes_[offset + whole] = room - whole;
      holes_.erase(block->offset);
      std::memset(block->back(), kPoison, whole);
      count(*block, stats.reserved_bytes, whole);
      count(*block, stats.segment, 1);
      return block;
    }
    return nullptr;
  }

  void cut(Block* block, size_t nbytes) {
    auto* rest = new Block{device_, block->stream, block->offset + nbytes, block->nbytes - nbytes, block->is_large};
    rest->is_free = true;
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->nbytes = nbytes;
    free_of(*rest).insert(rest);
  }

  void give_back(Block* block) {
    auto& stream = Streams::all().at(device_, block->stream);
    // The next owner may write at once: whoever uses the memory on another stream has to be before this.
    note(stream, {{block->face(), block->nbytes, true}}, "free");
    // Where seconds are asked about, poison would take some of them.
    if (!Timing::all().is_on()) Streams::all().enqueue(stream, [at = block->back(), n = block->nbytes] { std::memset(at, kPoison, n); });
    count(*block, stats.active_bytes, -int64_t(block->nbytes));
    count(*block, stats.active, -1);
    block->is_free = true;
    block->used_on.clear();
    auto& free = free_of(*block);
    if (Block* other = block->before; other && other->is_free) {
      free.erase(other);
      block->before = other->before;
      if (block->before) block->before->after = block;
      block->offset = other->offset;
      block->nbytes += other->nbytes;
      delete other;
    }
    if (Block* other = block->after; other && other->is_free) {
      free.erase(other);
      block->after = other->after;
      if (block->after) block->after->before = block;
      block->nbytes += other->nbytes;
      delete other;
    }
    free.insert(block);
  }

  void settle(bool waits) {
    for (size_t i = 0; i < waiting_.size();) {
      bool is_done = true;
      for (auto& event : waiting_[i].until) {
        if (waits) event.synchronize();
        is_done = is_done && (event.stream->done >= event.position || (Timing::all().is_on() && event.query()));
      }
      if (!is_done) {
        ++i;
        continue;
      }
      // Seen by the host, and so by whatever is enqueued next on the block's own stream.
      for (auto& event : waiting_[i].until) join(Races::all().host, event.clock);
      give_back(waiting_[i].block);
      waiting_.erase(waiting_.begin() + i);
    }
  }

  void add_hole(size_t offset, size_t nbytes) {
    auto it = holes_.emplace(offset, nbytes).first;
    auto next = std::next(it);
    if (next != holes_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      holes_.erase(next);
    }
    if (it == holes_.begin()) return;
    auto before = std::prev(it);
    if (before->first + before->second != it->first) return;
    before->second += it->second;
    holes_.erase(it);
  }

  int device_;
  Free small_, large_;
  std::unordered_map<size_t, Block*> live_;  // by offset
  std::map<size_t, size_t> holes_;           // addresses without a segment: offset to bytes
  std::vector<Waiting> waiting_;             // freed, but named on streams that are not that far
};

inline Pool& pool(int device) {
  static auto* pools = [] {
    auto* made = new std::vector<Pool*>;
    for (int d = 0; d < kDevices; ++d) made->push_back(new Pool(d));
    return made;
  }();
  return *(*pools)[device];
}

struct Allocator final : c10::DeviceAllocator {
  static Allocator& one() {
    static auto* allocator = new Allocator;
    return *allocator;
  }
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(nbytes, t_device); }
  c10::DataPtr allocate_on(size_t nbytes, int device) {
    c10::Device where(kType, device);
    if (!nbytes) return {nullptr, nullptr, &give_up, where};
    Guarded lock(everything());
    void* face = pool(device).take(nbytes)->face();
    return {face, face, &give_up, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_up; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(behind(to), behind(from), nbytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Guarded lock(everything());
    for (int d = 0; d < kDevices; ++d) pool(d).release();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Guarded lock(everything());
    int d = device_of(pointer.get());
    if (d >= 0) pool(d).record(static_cast<char*>(pointer.get()) - span(d).face, stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Guarded lock(everything());
    return pool(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Guarded lock(everything());
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Guarded lock(everything());
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Guarded lock(everything());
    return {kTotalBytes - pool(device).stats.reserved_bytes[0].current, kTotalBytes};
  }

 private:
  static void give_up(void* face) {
    if (!face) return;
    Guarded lock(everything());
    int d = device_of(face);
    pool(d).free(static_cast<char*>(face) - span(d).face);
  }
  template <typename F>
  static void each(int device, F f) {
    auto& s = pool(device).stats;
    for (auto* array : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      for (auto& stat : *array) f(stat);
  }
};

}  // namespace late
