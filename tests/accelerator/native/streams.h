// Streams whose work is as late as it may be.
//
// A stream is a list of pending tasks. Nothing runs beside the host: a task runs when somebody who is behind it is in need
// of it (the host waits, a kernel is launched on the stream, another stream's task waits for an event of it), in the thread
// of whoever needs it. So a wait that is missing is missed every time, and no test depends on a clock. Whatever order a GPU
// may choose lies between "as late as may be" and "at once"; `random` draws one in between, from a seed.
#pragma once

#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <random>

#include "races.h"
#include "timing.h"

namespace late {

enum class Lateness { latest, prompt, random };

struct LateStream {
  int device;
  int64_t id;      // within the device; 0 is the default stream
  size_t number;   // over all devices: the place in clocks
  std::deque<std::function<void()>> pending;
  uint64_t enqueued = 0, done = 0;
  Clock clock;
  double through_s = 0;  // see timing.h: when all that it was given is through
  c10::Stream handle() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id); }
};

class Streams {
 public:
  static Streams& all() {
    static auto* one = new Streams;
    return *one;
  }

  Lateness lateness = Lateness::latest;
  std::mt19937 generator{0};
  uint64_t tasks = 0, late_copies = 0;  // so that a test can show that it tested something

  LateStream& get(const c10::Stream& stream) { return at(stream.device_index() < 0 ? 0 : stream.device_index(), stream.id()); }
  LateStream& at(int device, int64_t id) {
    Guarded lock(everything());
    while (int64_t(streams_[device].size()) <= id) make(device);
    return *streams_[device][id];
  }
  LateStream& add(int device) {
    Guarded lock(everything());
    if (streams_[device].empty()) make(device);  // number 0 of each device is its default stream
    return make(device);
  }

  void enqueue(LateStream& stream, std::function<void()> task) { enqueue(stream, false, std::move(task)); }
  void enqueue(LateStream& stream, bool is_late_copy, std::function<void()> task) {
    Guarded lock(everything());
    late_copies += is_late_copy;
    stream.pending.push_back(std::move(task));
    ++stream.enqueued;
    ++tasks;
    if (lateness == Lateness::prompt) run(stream, stream.enqueued);
    if (lateness == Lateness::random) run_some();
  }

  // Runs the stream's tasks up to the n-th, and before each what it waits for. The recursion ends because a task waits
  // only for what was enqueued before it.
  void run(LateStream& stream, uint64_t n) {
    Guarded lock(everything());
    Standing standing;
    while (stream.done < n) {
      auto task = std::move(stream.pending.front());
      stream.pending.pop_front();
      task();
      ++stream.done;
    }
  }
  void drain(LateStream& stream) { run(stream, stream.enqueued); }

  // Another clock begins: what is through by the one before is through.
  void begin(Pace pace) {
    Guarded lock(everything());
    if (pace != Timing::all().pace)
      for (auto& list : streams_)
        for (auto* stream : list) stream->through_s = 0;
    Timing::all().begin(pace);
  }

  void pass_link(LateStream& stream, bool to_host, size_t nbytes) {
    Guarded lock(everything());
    stream.through_s = Timing::all().pass_link(to_host, nbytes, stream.through_s);
  }

  // The host waits for all that the stream was given.
  void synchronize(LateStream& stream) {
    Timing::all().wait_until(stream.through_s);
    Guarded lock(everything());
    drain(stream);
    join(Races::all().host, stream.clock);
  }
  void synchronize(int device) {
    double then_s = 0;
    {
      Guarded lock(everything());
      for (auto* stream : streams_[device]) then_s = std::max(then_s, stream->through_s);
    }
    Timing::all().wait_until(then_s);
    Guarded lock(everything());
    for (size_t i = 0; i < streams_[device].size(); ++i) synchronize(*streams_[device][i]);
  }

 private:
  LateStream& make(int device) {
    auto* stream = new LateStream{device, int64_t(streams_[device].size()), count_++, {}, 0, 0, {}};
    streams_[device].push_back(stream);
    return *stream;
  }
  void run_some() {
    std::vector<LateStream*> busy;
    for (auto& list : streams_)
      for (auto* stream : list)
        if (!stream->pending.empty()) busy.push_back(stream);
    if (busy.empty() || generator() % 2) return;
    auto& chosen = *busy[generator() % busy.size()];
    run(chosen, chosen.done + 1 + generator() % chosen.pending.size());
  }

  std::array<std::vector<LateStream*>, kDevices> streams_;
  size_t count_ = 0;
};

inline thread_local int t_device = 0;
inline thread_local int64_t t_stream[kDevices] = {};

inline int index_or_current(int index) { return index < 0 ? t_device : index; }
inline LateStream& current(int device) { return Streams::all().at(device, t_stream[device]); }

// The accesses of an operation that the stream runs next.
size_t note(LateStream& stream, const std::vector<Touch>& touches, const std::string& what);

// ------------------------------------------------------------------------------------------------ events
struct Event {
  LateStream* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
  double through_s = 0;
  int queries = 0;

  void record(LateStream& on) {
    Guarded lock(everything());
    stream = &on;
    position = on.enqueued;
    clock = on.clock;
    through_s = std::max(on.through_s, Timing::all().is_on() ? Timing::all().now_s() : 0.0);
    join(clock, Races::all().host);
    queries = 0;
  }
  void block(LateStream& waiting) {
    Guarded lock(everything());
    if (!stream) return;
    join(waiting.clock, clock);
    if (stream == &waiting) return;
    waiting.through_s = std::max(waiting.through_s, through_s);
    Streams::all().enqueue(waiting, [on = stream, n = position] { Streams::all().run(*on, n); });
  }
  bool query() {
    Guarded lock(everything());
    if (!stream || stream->done >= position) return true;
    if (Timing::all().is_on()) {
      if (Timing::all().now_s() < through_s) return false;
      synchronize();
      return true;
    }
    // Whoever asks again and again waits: a GPU would come to an end, so the thousandth answer is the truth of later.
    if (++queries < 1000) return false;
    synchronize();
    return true;
  }
  void synchronize() {
    if (stream) Timing::all().wait_until(through_s);
    Guarded lock(everything());
    if (!stream) return;
    Streams::all().run(*stream, position);
    join(Races::all().host, clock);
  }
};

}  // namespace late
