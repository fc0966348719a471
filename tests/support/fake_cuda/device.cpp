// A fake of CUDA for a CPU build of torch: device memory, streams, events, graphs and errors behind the device "cuda".
//
// Tensors on it are real tensors of device type CUDA; their memory lies at addresses that the host cannot access. All
// work is put into queues, one for each stream, and is done when something waits for it, at once, or at random times.
// What is done never depends on real time: a waiting thread does the work that it waits for. Only for measurements
// (PACED) copies between host and device take as long as a bus of some rate takes, and move nothing.
//
// Sources: CUDA Runtime API (streams, events, stream capture), c10/cuda/CUDACachingAllocator.cpp, ATen/native/cuda/Copy.cu.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace py = pybind11;

namespace fake {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr auto TYPE = DeviceType::CUDA;
constexpr size_t SPACE = size_t(16) << 30; // addresses of one device
constexpr size_t ROUND = 512; // granularity of the allocator
constexpr int MAX_DEVICES = 8;
constexpr unsigned char SCRIBBLE = 0xDB; // what freed device memory is overwritten with

enum Timing { LATE, EAGER, RANDOM, PACED };
enum CaptureMode { GLOBAL, THREAD_LOCAL, RELAXED };
enum Code { // of cudaError_t
  OK = 0,
  INVALID = 1,
  NO_MEMORY = 2,
  LAUNCH_FAILURE = 719,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
};

[[noreturn]] void raise(int code, const std::string& text) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, "CUDA error: " + text);
}

struct Graph;

using Clock = std::chrono::steady_clock;

// A point in a stream: done when all work before it is.
struct Ticket {
  bool done = false;
  Clock::time_point due; // PACED: not before
  int device = 0;
  int64_t stream = 0;
  Graph* graph = nullptr; // set if it was recorded into a graph that is being captured
  std::chrono::steady_clock::time_point when;
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Op {
  std::function<void()> run; // work, or nothing
  TicketPtr wait; // not before this is done
  TicketPtr mark; // done with this
  uintptr_t host = 0; // pinned host memory that it reads or writes
  size_t length = 0;
  bool up = false; // reads it
};

struct Queue {
  int device;
  int64_t id;
  std::deque<Op> ops;
  Graph* capture = nullptr;
  Clock::time_point due; // PACED: all of it is done then
};

struct Graph {
  Queue* origin = nullptr;
  int mode = GLOBAL;
  std::thread::id owner;
  bool valid = true;
  std::set<Queue*> joined;
  std::vector<Op> ops;
};

struct Block {
  int device;
  size_t offset, size;
  int64_t stream;
  std::set<int64_t> used_by; // other streams, by record_stream
  std::vector<TicketPtr> pending; // what has to be done before it may be reused
  bool of_graph = false;
};

struct Event {
  int device;
  TicketPtr ticket;
};

struct Memory {
  char* base = nullptr; // device addresses: not accessible
  char* real = nullptr; // the bytes
  size_t limit = SPACE, end = 0;
  size_t allocated = 0, reserved = 0, peak = 0, requested = 0;
  size_t ooms = 0, retries = 0;
  std::multimap<size_t, size_t> holes; // size -> offset of segments that were given back
  std::list<Block*> cached;
  bool context = false;
  Clock::time_point bus[2]; // PACED: when what is queued so far has crossed, down and up
};

struct Host {
  size_t length;
  bool ours; // of the allocator of pinned memory
};

thread_local int current_device = 0;
thread_local int64_t current_streams[MAX_DEVICES] = {};
thread_local int last_error = OK;
thread_local int capture_mode = GLOBAL;

struct World {
  std::recursive_mutex mutex;
  int devices = 2;
  Memory memory[MAX_DEVICES];
  std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> queues;
  std::vector<Graph*> captures;
  std::map<uintptr_t, Host> pinned;
  std::vector<void*> graveyard;
  std::vector<std::string> faults;
  std::map<std::string, int64_t> counts;
  int64_t next_stream = 1;
  int timing = LATE;
  double rate = 0; // PACED: bytes per nanosecond
  std::mt19937_64 random{0};
  int64_t fail_allocation = -1, fail_launch = -1, fail_register = -1, fail_unregister = -1; // calls until one fails
  size_t pin_limit = SIZE_MAX, pinned_bytes = 0;
  bool forked = false;
};

World& world() {
  static World* made = new World; // never destroyed: tensors may outlive it
  return *made;
}

// The lock. A thread that has to wait for it gives up the GIL meanwhile, as work may be Python functions.
struct Lock {
  Lock() {
    if (world().forked)
      raise(3, "initialization error: this process was forked after CUDA was initialized");
    if (world().mutex.try_lock())
      return;
    if (Py_IsInitialized() && PyGILState_Check())
      state = PyEval_SaveThread();
    world().mutex.lock();
  }
  ~Lock() {
    world().mutex.unlock();
    if (state)
      PyEval_RestoreThread(state);
  }
  PyThreadState* state = nullptr;
};

void fault(const std::string& text) {
  world().faults.push_back(text);
}

Queue& queue(int device, int64_t id) {
  auto& found = world().queues[{device, id}];
  if (!found) {
    found = std::make_unique<Queue>();
    found->device = device;
    found->id = id;
  }
  return *found;
}

Queue& current(int device) {
  return queue(device, current_streams[device]);
}

void touch(int device) {
  TORCH_CHECK(device >= 0 && device < world().devices, "CUDA error: invalid device ordinal");
  world().memory[device].context = true;
}

// Scheduling

bool run_head(Queue& q) {
  if (q.ops.empty() || (q.ops.front().wait && !q.ops.front().wait->done))
    return false;
  Op op = std::move(q.ops.front());
  q.ops.pop_front();
  if (op.run) {
    try {
      op.run();
    } catch (const std::exception& error) {
      fault(std::string("work on a device failed: ") + error.what());
    }
  }
  if (op.mark) {
    op.mark->when = std::chrono::steady_clock::now();
    op.mark->done = true;
  }
  return true;
}

void drive(const TicketPtr& ticket) {
  while (!ticket->done) {
    Queue& q = queue(ticket->device, ticket->stream);
    TORCH_CHECK(!q.ops.empty(), "fake CUDA: a wait for work that is in no queue");
    auto wait = q.ops.front().wait;
    if (wait && !wait->done)
      drive(wait);
    else
      run_head(q);
  }
}

void drain(Queue& q) {
  while (!q.ops.empty()) {
    auto wait = q.ops.front().wait;
    if (wait && !wait->done)
      drive(wait);
    else
      run_head(q);
  }
}

void drain_device(int device) {
  for (auto& [key, q] : world().queues)
    if (key.first == device)
      drain(*q);
}

// Let the devices do some of their work, at random.
void pass_time() {
  World& w = world();
  if (w.timing != RANDOM)
    return;
  std::vector<Queue*> busy;
  for (auto& [key, q] : w.queues)
    if (!q->ops.empty())
      busy.push_back(q.get());
  for (auto left = w.random() % 4; left && !busy.empty(); left--)
    run_head(*busy[w.random() % busy.size()]);
}

// When a real device would have done this work, whose copies take their turns on the bus.
void pace(Queue& q, Op& op) {
  q.due = std::max(q.due, Clock::now());
  if (op.wait)
    q.due = std::max(q.due, op.wait->due);
  if (op.length) {
    auto& bus = world().memory[q.device].bus[op.up];
    q.due = bus = std::max(bus, q.due) + std::chrono::nanoseconds(int64_t(op.length / world().rate));
    op.run = nullptr;
  }
  if (op.mark)
    op.mark->due = q.due;
}

// Sleep as a thread does that waits for a device. The caller holds neither the lock nor the GIL.
void sleep_until(const std::function<Clock::time_point()>& due) {
  if (world().timing != PACED)
    return;
  Clock::time_point when;
  {
    Lock lock;
    when = due();
  }
  std::this_thread::sleep_until(when);
}

void enqueue(Queue& q, Op op) {
  touch(q.device);
  if (q.capture) {
    q.capture->ops.push_back(std::move(op));
    return;
  }
  if (world().timing == PACED)
    pace(q, op);
  q.ops.push_back(std::move(op));
  if (world().timing == EAGER)
    drain(q);
  else
    pass_time();
}

TicketPtr mark(Queue& q) {
  auto ticket = std::make_shared<Ticket>();
  ticket->device = q.device;
  ticket->stream = q.id;
  ticket->graph = q.capture;
  Op op;
  op.mark = ticket;
  enqueue(q, std::move(op));
  return ticket;
}

// Whether this call would spoil a capture that is under way: then the capture is spoiled.
bool spoils() {
  bool found = false;
  for (Graph* graph : world().captures) {
    bool own = graph->owner == std::this_thread::get_id() && graph->mode != RELAXED;
    bool others = capture_mode == GLOBAL && graph->mode == GLOBAL;
    if (capture_mode != RELAXED && (own || others)) {
      graph->valid = false;
      found = true;
    }
  }
  return found;
}

void unsafe(const char* call) {
  world().counts[call]++;
  if (spoils())
    raise(CAPTURE_UNSUPPORTED, std::string("operation not permitted when stream is capturing: ") + call);
}

bool countdown(int64_t& left) {
  return left >= 0 && left-- == 0;
}

// What every kernel and copy does first: an error that an earlier call of this thread left behind is raised here.
void launch() {
  world().counts["launch"]++;
  if (int code = last_error) {
    last_error = OK;
    raise(code, "left behind by an earlier call, code " + std::to_string(code));
  }
  if (countdown(world().fail_launch))
    raise(LAUNCH_FAILURE, "unspecified launch failure");
}

// Device memory

Memory& memory(int device) {
  Memory& m = world().memory[device];
  if (!m.base) {
    m.base = (char*)mmap(nullptr, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m.real = (char*)mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(m.base != MAP_FAILED && m.real != MAP_FAILED, "fake CUDA: no address space");
  }
  touch(device);
  return m;
}

// Where the bytes of a device address are.
void* real_address(const void* address) {
  if (!address)
    return nullptr;
  for (auto& m : world().memory)
    if (m.base && (char*)address >= m.base && (char*)address < m.base + SPACE)
      return m.real + ((char*)address - m.base);
  TORCH_CHECK(false, "fake CUDA: ", address, " is no address of a device");
}

void release_cached(int device) {
  Memory& m = memory(device);
  drain_device(device);
  for (Block* block : m.cached) {
    m.reserved -= block->size;
    m.holes.emplace(block->size, block->offset);
    madvise(m.real + block->offset, block->size & ~size_t(4095), MADV_DONTNEED);
    delete block;
  }
  m.cached.clear();
}

Block* new_segment(int device, size_t size) {
  Memory& m = memory(device);
  if (m.reserved + size > m.limit)
    return nullptr;
  unsafe("cudaMalloc");
  size_t offset = m.end;
  auto hole = m.holes.find(size);
  if (hole != m.holes.end()) {
    offset = hole->second;
    m.holes.erase(hole);
  } else {
    if (m.end + size > SPACE)
      return nullptr;
    m.end += size;
  }
  m.reserved += size;
  return new Block{device, offset, size, current(device).id, {}, {}, false};
}

Block* reuse(int device, size_t size) {
  Memory& m = memory(device);
  auto stream = current(device).id;
  for (auto at = m.cached.begin(); at != m.cached.end(); ++at) {
    Block* block = *at;
    auto& pending = block->pending;
    pending.erase(std::remove_if(pending.begin(), pending.end(), [](auto& t) { return t->done; }), pending.end());
    if (block->stream == stream && block->size == size && pending.empty()) {
      m.cached.erase(at);
      return block;
    }
  }
  return nullptr;
}

void free_block(void* context) {
  if (world().forked)
    return;
  Lock lock;
  auto* block = (Block*)context;
  Memory& m = memory(block->device);
  m.allocated -= block->size;
  if (block->of_graph)
    return; // memory of a graph stays with it
  for (auto id : block->used_by)
    block->pending.push_back(mark(queue(block->device, id)));
  bool alone = block->used_by.empty();
  block->used_by.clear();
  m.cached.push_back(block);
  Queue& own = queue(block->device, block->stream);
  if (alone && !own.capture) {
    // In the order of its stream, as if the next owner of the memory wrote there at once.
    Op op;
    op.run = [at = m.real + block->offset, n = block->size] { memset(at, SCRIBBLE, n); };
    enqueue(own, std::move(op));
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Lock lock;
    int device = current_device;
    Memory& m = memory(device);
    if (!nbytes)
      return {nullptr, Device(TYPE, device)};
    world().counts["allocate"]++;
    size_t size = (nbytes + ROUND - 1) / ROUND * ROUND;
    bool fails = countdown(world().fail_allocation);
    Block* block = nullptr;
    if (Queue& q = current(device); q.capture) {
      int mode = std::exchange(capture_mode, RELAXED); // from the graph's private pool
      block = new_segment(device, size);
      capture_mode = mode;
      if (block)
        block->of_graph = true;
    } else if (!fails) {
      block = reuse(device, size);
      if (!block)
        block = new_segment(device, size);
      if (!block) {
        m.retries++;
        release_cached(device);
        block = new_segment(device, size);
      }
    }
    if (!block) {
      m.ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", device, " has ",
          m.limit - m.reserved, " bytes free.");
    }
    m.allocated += size;
    m.requested = std::max(m.requested, size);
    m.peak = std::max(m.peak, m.allocated);
    return {m.base + block->offset, block, &free_block, Device(TYPE, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    Lock lock;
    drain_device(current_device);
    memcpy(real_address(to), real_address(from), count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock;
    for (int device = 0; device < world().devices; device++)
      if (world().memory[device].base)
        release_cached(device);
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    Lock lock;
    if (data.get_deleter() != &free_block)
      return;
    auto* block = (Block*)data.get_context();
    if (block && block->stream != stream.id())
      block->used_by.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    return {};
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_memory)

// Pinned host memory

bool is_pinned(const void* address, size_t length) {
  auto& pinned = world().pinned;
  auto after = pinned.upper_bound((uintptr_t)address);
  if (after == pinned.begin())
    return false;
  auto& [start, host] = *std::prev(after);
  return (uintptr_t)address + length <= start + host.length;
}

bool in_flight(uintptr_t start, size_t length) {
  for (auto& [key, q] : world().queues)
    for (auto& op : q->ops)
      if (op.length && op.host < start + length && start < op.host + op.length)
        return true;
  return false;
}

int host_register(uintptr_t address, size_t length) {
  Lock lock;
  touch(current_device);
  world().counts["cudaHostRegister"]++;
  if (spoils())
    return last_error = CAPTURE_UNSUPPORTED;
  if (countdown(world().fail_register) || world().pinned_bytes + length > world().pin_limit)
    return last_error = NO_MEMORY;
  for (auto& [start, host] : world().pinned)
    if (address < start + host.length && start < address + length)
      return last_error = ALREADY_REGISTERED;
  world().pinned[address] = {length, false};
  world().pinned_bytes += length;
  return OK;
}

int host_unregister(uintptr_t address) {
  Lock lock;
  touch(current_device);
  world().counts["cudaHostUnregister"]++;
  if (spoils())
    return last_error = CAPTURE_UNSUPPORTED;
  auto found = world().pinned.find(address);
  if (countdown(world().fail_unregister))
    return last_error = INVALID;
  if (found == world().pinned.end())
    return last_error = NOT_REGISTERED;
  if (in_flight(address, found->second.length))
    fault("memory was unregistered while a device may still copy from or to it");
  world().pinned_bytes -= found->second.length;
  world().pinned.erase(found);
  return OK;
}

void free_pinned(void* address) {
  Lock lock;
  auto found = world().pinned.find((uintptr_t)address);
  if (found == world().pinned.end())
    return;
  for (auto& [key, q] : world().queues) // as events of the allocator of pinned memory do
    if (in_flight((uintptr_t)address, found->second.length))
      drain(*q);
  world().pinned.erase(found);
  free(address);
}

struct PinnedMemory final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    Lock lock;
    if (!nbytes)
      return {nullptr, at::kCPU};
    unsafe("cudaHostAlloc");
    void* address = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    TORCH_CHECK(address, "fake CUDA: no host memory");
    world().pinned[(uintptr_t)address] = {nbytes, true};
    return {address, address, &free_pinned, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

PinnedMemory pinned_memory;

// Devices, streams and events, as torch asks for them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return TYPE;
  }
  Device exchangeDevice(Device device) const override {
    Device before(TYPE, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(TYPE, current_device);
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < world().devices, "CUDA error: invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  Stream getStream(Device device) const override {
    int index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(TYPE, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    Lock lock;
    int index = device.has_index() ? device.index() : current_device;
    touch(index);
    return Stream(Stream::UNSAFE, Device(TYPE, index), world().next_stream++);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event)
      *event = new Event{stream.device_index(), nullptr};
    auto* found = (Event*)*event;
    TORCH_CHECK(found->device == stream.device_index(), "CUDA error: an event of another device is recorded");
    found->ticket = mark(queue(stream.device_index(), stream.id()));
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock;
    auto* found = (Event*)event;
    if (!found || !found->ticket || found->ticket->done)
      return;
    Queue& q = queue(stream.device_index(), stream.id());
    if (Graph* graph = found->ticket->graph) {
      q.capture = graph;
      graph->joined.insert(&q);
      return;
    }
    if (q.capture) {
      q.capture->valid = false;
      raise(CAPTURE_UNSUPPORTED, "a stream that is capturing waits for an event from outside of the capture");
    }
    Op op;
    op.wait = found->ticket;
    enqueue(q, std::move(op));
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    unsafe("cudaEventQuery");
    auto* found = (Event*)event;
    pass_time();
    if (world().timing == PACED && found && found->ticket && found->ticket->due <= Clock::now())
      drive(found->ticket);
    return !found || !found->ticket || found->ticket->done;
  }
  void synchronizeEvent(void* event) const override {
    auto* found = (Event*)event;
    sleep_until([&] { return found && found->ticket ? found->ticket->due : Clock::time_point(); });
    Lock lock;
    unsafe("cudaEventSynchronize");
    if (found && found->ticket) {
      if (found->ticket->graph)
        raise(CAPTURE_UNSUPPORTED, "an event of a capture is waited for");
      drive(found->ticket);
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return world().devices;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock;
    unsafe("cudaStreamQuery");
    pass_time();
    return queue(stream.device_index(), stream.id()).ops.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    sleep_until([&] { return queue(stream.device_index(), stream.id()).due; });
    Lock lock;
    unsafe("cudaStreamSynchronize");
    touch(stream.device_index());
    drain(queue(stream.device_index(), stream.id()));
  }
  bool isStreamCapturing(const Stream& stream) const override {
    return queue(stream.device_index(), stream.id()).capture;
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Lock lock;
    unsafe("cudaDeviceSynchronize");
    touch(device);
    drain_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto &a = ((Event*)first)->ticket, &b = ((Event*)second)->ticket;
    TORCH_CHECK(a && b && a->done && b->done, "CUDA error: device not ready");
    return std::chrono::duration<double, std::milli>(b->when - a->when).count();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

} // namespace fake

namespace at {

struct FakeHooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasCUDART() const override {
    return true;
  }
  Device getDeviceFromPtr(void* data) const override {
    for (int i = 0; i < fake::MAX_DEVICES; i++)
      if (auto base = fake::world().memory[i].base; base && data >= base && data < base + fake::SPACE)
        return Device(kCUDA, i);
    return kCPU;
  }
  bool isPinnedPtr(const void* data) const override {
    fake::Lock lock;
    return fake::is_pinned(data, 1);
  }
  bool hasPrimaryContext(DeviceIndex device) const override {
    return fake::world().memory[device].context;
  }
  DeviceIndex current_device() const override {
    return fake::current_device;
  }
  DeviceIndex deviceCount() const override {
    return fake::world().devices;
  }
  DeviceIndex getCurrentDevice() const override {
    return fake::current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    fake::current_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(fake::current_device, int(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(fake::current_device, int(device));
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return &fake::pinned_memory;
  }
  Allocator* getCUDADeviceAllocator() const override {
    return &fake::device_memory;
  }
  int getNumGPUs() const override {
    return fake::world().devices;
  }
  void deviceSynchronize(DeviceIndex device) const override {
    fake::Guard().synchronizeDevice(device);
  }
};

FakeHooks hooks;

} // namespace at

namespace fake {

// Operators

using at::Tensor;

const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

struct OnDevice { // makes a device current in a block
  explicit OnDevice(int device) : before(std::exchange(current_device, device)) {}
  ~OnDevice() {
    current_device = before;
  }
  int before;
};

void like(const Tensor& to, const Tensor& from) {
  auto* made = to.unsafeGetTensorImpl();
  made->set_storage_offset(from.storage_offset());
  made->set_sizes_and_strides(from.sizes(), from.strides());
  if (from.is_conj())
    to._set_conj(true);
  if (from.is_neg())
    to._set_neg(true);
}

// A tensor of the host with the bytes of one of the device. It does not keep them alive.
Tensor host_view(const Tensor& t) {
  auto nbytes = t.storage().nbytes();
  auto* at = real_address(t.storage().data());
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, c10::DataPtr(at, at::kCPU), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  like(made, t);
  return made;
}

Tensor view_of(const Tensor& base, const Tensor& shape) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
  made._set_conj(false);
  made._set_neg(false);
  like(made, shape);
  return made;
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, KEYS, dtype.value_or(at::get_default_dtype_as_scalartype()),
      format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory, KEYS,
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Tensor& set_storage(
    Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  } else {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t n = int64_t(source.nbytes() / self.dtype().itemsize());
  std::vector<c10::SymInt> size{n}, stride{1};
  return set_storage(self, std::move(source), 0, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  like(self, source);
  return self;
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t nbytes = c10::multiply_integers(sizes) * self.dtype().itemsize();
  auto* impl = self.unsafeGetTensorImpl();
  if (nbytes > self.storage().nbytes()) {
    Lock lock;
    OnDevice on(self.device().index());
    auto data = device_memory.allocate(nbytes);
    drain_device(current_device);
    if (auto old = self.storage().nbytes())
      memcpy(real_address(data.get()), real_address(self.storage().data()), old);
    self.storage().set_data_ptr(std::move(data));
    self.storage().set_nbytes(nbytes);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

void resize_storage(const Tensor& whole, size_t nbytes) { // what UntypedStorage.resize_ does
  Lock lock;
  OnDevice on(whole.device().index());
  auto data = device_memory.allocate(nbytes);
  if (size_t kept = std::min(nbytes, whole.storage().nbytes())) {
    drain_device(current_device);
    memcpy(real_address(data.get()), real_address(whole.storage().data()), kept);
  }
  whole.storage().set_data_ptr(std::move(data));
  whole.storage().set_nbytes(nbytes);
}

void record_stream(Tensor& self, Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

struct Flat { // host memory of a copy that runs by itself, without the host
  uintptr_t start;
  size_t length;
};

std::optional<Flat> flat(const Tensor& t) {
  auto* data = t.const_data_ptr();
  size_t n = t.numel() * t.dtype().itemsize();
  if (!t.is_contiguous() || t.is_conj() || t.is_neg() || !is_pinned(data, n))
    return std::nullopt;
  return Flat{(uintptr_t)data, n};
}

std::function<void()> if_pinned(Flat host, std::function<void()> run) {
  return [host, run = std::move(run)] {
    if (is_pinned((void*)host.start, host.length))
      run();
    else
      fault("a device copied from or to host memory that was not pinned any more");
  };
}

void finish(Queue& q) { // waits as a blocking copy does
  if (q.capture) {
    q.capture->valid = false;
    raise(CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing: a blocking copy");
  }
  unsafe("cudaStreamSynchronize");
  drain(q);
}

void upload(const Tensor& self, const Tensor& source, bool wait_not) {
  Queue& q = current(self.device().index());
  Op op;
  auto host = flat(source);
  if (host && source.scalar_type() == self.scalar_type() && self.is_contiguous()) {
    op.run = if_pinned(*host, [to = host_view(self).data_ptr(), from = (void*)host->start, n = host->length] {
      memcpy(to, from, n);
    });
    op.host = host->start, op.length = host->length, op.up = true;
  } else {
    // Pageable memory is staged before the call returns; other strides and types go through a temporary.
    op.run = [to = host_view(self), from = source.clone()]() mutable { to.copy_(from); };
    wait_not = wait_not && source.is_contiguous();
  }
  enqueue(q, std::move(op));
  if (!wait_not)
    finish(q);
}

void download(const Tensor& self, const Tensor& source, bool wait_not) {
  Queue& q = current(source.device().index());
  Op op;
  auto host = flat(self);
  Tensor from = host_view(source);
  if (wait_not && host) {
    Tensor to = at::from_blob((void*)host->start, self.sizes(), self.strides(), self.options());
    op.run = if_pinned(*host, [to, from]() mutable { to.copy_(from); });
    op.host = host->start, op.length = host->length;
    enqueue(q, std::move(op));
    return;
  }
  finish(q);
  at::NoGradGuard no_grad;
  const_cast<Tensor&>(self).copy_(from);
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel())
    return self;
  Lock lock;
  Tensor from = source.expand_as(self);
  launch();
  if (source.is_cpu()) {
    world().counts["upload"]++;
    upload(self, from, non_blocking);
  } else if (self.is_cpu()) {
    world().counts["download"]++;
    download(self, from, non_blocking);
  } else {
    Queue &q = current(self.device().index()), &theirs = current(source.device().index());
    if (&q != &theirs) {
      Op wait;
      wait.wait = mark(theirs);
      enqueue(q, std::move(wait));
    }
    Op op;
    op.run = [to = host_view(self), from = host_view(from)]() mutable { to.copy_(from); };
    enqueue(q, std::move(op));
    if (&q != &theirs) {
      Op wait;
      wait.wait = mark(q);
      enqueue(theirs, std::move(wait));
    }
  }
  return self;
}

// Every other operator: done on the host, with the same bytes

struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack on_host, arguments;
  std::vector<std::pair<Tensor, Tensor>> pairs; // on the device, on the host
  int device = -1;

  Tensor convert(const Tensor& t) {
    if (!t.defined() || !t.is_cuda())
      return t;
    device = device < 0 ? t.device().index() : device;
    // What is empty may be an `out` that is to be resized, as only memory of its own can be.
    auto made = t.numel() ? host_view(t) : at::empty(t.sizes(), t.options().device(at::kCPU));
    pairs.emplace_back(t, made);
    return made;
  }

  c10::IValue convert(const c10::IValue& value) {
    if (value.isTensor())
      return convert(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& t : value.toTensorList())
        made.push_back(convert(t));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& t : value.toOptionalTensorList())
        made.push_back(t ? std::optional<Tensor>(convert(*t)) : t);
      return made;
    }
    if (value.isDevice())
      return c10::IValue(Device(at::kCPU));
    return value;
  }

  c10::IValue back(const c10::IValue& value) {
    if (value.isTensor())
      return back(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& t : value.toTensorList())
        made.push_back(back(t));
      return made;
    }
    return value;
  }

  Tensor back(const Tensor& t) {
    if (!t.defined() || !t.is_cpu())
      return t;
    for (auto& [on_device, on_host] : pairs) {
      if (t.is_same(on_host)) {
        if (!t.sizes().equals(on_device.sizes())) { // an `out` that was empty
          on_device.resize_(t.sizes());
          host_view(on_device).copy_(t);
        }
        return on_device;
      }
      if (t.storage().data() && t.storage().data() == on_host.storage().data())
        return view_of(on_device, t);
    }
    OnDevice on(std::max(device, 0));
    Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), &device_memory, KEYS, t.scalar_type());
    host_view(made).copy_(t.resolve_conj().resolve_neg());
    return made;
  }
};

bool only_views(const c10::FunctionSchema& schema) {
  auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](auto& one) {
    return one.alias_info() && !one.alias_info()->isWrite();
  });
}

// Whether a call changes tensors that are there and gives nothing else, so that it can be done later.
bool only_in_place(const c10::FunctionSchema& schema, const torch::jit::Stack& given) {
  bool writes = false;
  for (size_t i = 0; i < given.size(); i++) {
    auto& argument = schema.arguments()[i];
    if (argument.type()->str().find("Generator") != std::string::npos)
      return false; // random numbers are drawn in the order of the calls
    if (!argument.alias_info() || !argument.alias_info()->isWrite())
      continue;
    auto is_this = [&](auto& one) { return one.isTensor() && one.toTensor().is_same(given[i].toTensor()); };
    if (argument.is_out() && given[i].isTensor() && !given[i].toTensor().numel() &&
        std::count_if(given.begin(), given.end(), is_this) == 1) // more often: in place
      return false; // it will be resized
    writes = true;
  }
  auto& returns = schema.returns();
  return writes && std::all_of(returns.begin(), returns.end(), [](auto& one) {
    return one.alias_info() && one.alias_info()->isWrite();
  });
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Lock lock;
  auto& schema = op.schema();
  Call call{op};
  call.arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  for (auto& value : call.arguments) {
    if (value.isDevice() && value.toDevice().is_cuda() && call.device < 0)
      call.device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
    call.on_host.push_back(call.convert(value));
  }
  torch::jit::drop(*stack, schema.arguments().size());
  at::AutoDispatchBelowADInplaceOrView below;
  int device = call.device < 0 ? current_device : call.device;
  if (only_views(schema)) {
    op.callBoxed(&call.on_host);
  } else if (only_in_place(schema, call.arguments)) {
    launch();
    Op work;
    work.run = [op, given = call.on_host]() {
      at::AutoDispatchBelowADInplaceOrView below_then;
      auto copy = given;
      op.callBoxed(&copy);
    };
    enqueue(current(device), std::move(work));
    for (size_t i = 0; i < schema.returns().size(); i++)
      for (size_t j = 0; j < schema.arguments().size(); j++) {
        auto* info = schema.arguments()[j].alias_info();
        if (info && *info == *schema.returns()[i].alias_info()) {
          stack->push_back(call.arguments[j]);
          break;
        }
      }
    return;
  } else {
    launch();
    if (current(device).capture) { // in a graph, what is allocated is made now, and computed in each replay
      std::vector<c10::IValue> made;
      auto trial = call.on_host;
      op.callBoxed(&trial);
      for (auto& value : trial)
        made.push_back(call.back(value));
      std::vector<Tensor> results;
      for (auto& value : made)
        if (value.isTensor())
          results.push_back(host_view(value.toTensor()));
      Op work;
      work.run = [op, given = call.on_host, results]() mutable {
        at::AutoDispatchBelowADInplaceOrView below_then;
        auto copy = given;
        op.callBoxed(&copy);
        size_t at = 0;
        for (auto& value : copy)
          if (value.isTensor())
            results[at++].copy_(value.toTensor());
      };
      enqueue(current(device), std::move(work));
      for (auto& value : made)
        stack->push_back(value);
      return;
    }
    drain(current(device));
    op.callBoxed(&call.on_host);
  }
  for (auto& value : call.on_host)
    stack->push_back(call.back(value));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Graphs

Graph* begin_capture(int mode) {
  Lock lock;
  Queue& q = current(current_device);
  TORCH_CHECK(q.id, "CUDA graphs must be captured on a non-default stream");
  TORCH_CHECK(!q.capture, "CUDA error: this stream is capturing already");
  auto* graph = new Graph{&q, mode, std::this_thread::get_id(), true, {&q}, {}};
  q.capture = graph;
  world().captures.push_back(graph);
  return graph;
}

void end_capture(Graph* graph) {
  Lock lock;
  auto& captures = world().captures;
  captures.erase(std::remove(captures.begin(), captures.end(), graph), captures.end());
  for (Queue* q : graph->joined)
    q->capture = nullptr;
  if (!graph->valid)
    raise(CAPTURE_INVALIDATED, "operation failed due to a previous error during capture");
}

void replay(Graph* graph) {
  Lock lock;
  launch();
  Queue& q = current(current_device);
  for (const Op& op : graph->ops) {
    Op again;
    again.run = op.run;
    enqueue(q, std::move(again));
  }
}

} // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake;
  pthread_atfork(nullptr, nullptr, [] {
    for (auto& one : world().memory)
      if (one.context)
        world().forked = true;
  });
  auto* preloaded = (const void**)dlsym(RTLD_DEFAULT, "fake_cuda_hooks");
  TORCH_CHECK(preloaded, "fake CUDA: its library is not preloaded");
  *preloaded = &at::hooks;
  py::class_<Graph>(m, "Graph");
  m.def("begin_capture", &begin_capture, py::return_value_policy::reference);
  m.def("end_capture", &end_capture);
  m.def("replay", &replay);
  m.def("is_capturing", [] { return current(current_device).capture != nullptr; });
  m.def("exchange_capture_mode", [](int mode) { return std::exchange(capture_mode, mode); });
  m.def("init", [] { at::globalContext().lazyInitDevice(TYPE); });
  m.def("device_count", [] { return world().devices; });
  m.def("set_device_count", [](int n) { world().devices = n; });
  m.def("device", [] { return current_device; });
  m.def("set_device", [](int device) { Guard().setDevice(Device(TYPE, device)); });
  m.def("exchange_device", [](int device) { return device < 0 ? -1 : std::exchange(current_device, device); });
  m.def("stream", [](int device) { return current_streams[device < 0 ? current_device : device]; });
  m.def("set_stream", [](int64_t id, int device) {
    current_device = device;
    current_streams[device] = id;
  });
  m.def("elapsed_time", [](uintptr_t first, uintptr_t second) {
    return Guard().elapsedTime((void*)first, (void*)second, current_device);
  });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("take_last_error", [] { return std::exchange(last_error, int(OK)); });
  m.def("peek_last_error", [] { return last_error; });
  m.def("memory_info", [](int device) {
    Memory& one = memory(device);
    return std::make_pair(one.limit - one.reserved, one.limit);
  });
  m.def("memory_stats", [](int device) {
    Memory& one = world().memory[device];
    return std::map<std::string, size_t>{
        {"allocated", one.allocated}, {"reserved", one.reserved}, {"peak", one.peak},
        {"ooms", one.ooms},           {"retries", one.retries},   {"largest", one.requested}};
  });
  m.def("reset_peak", [](int device) {
    auto& one = world().memory[device];
    one.peak = one.allocated;
    one.requested = 0;
  });
  m.def("set_limit", [](int device, size_t limit) { world().memory[device].limit = std::min(limit, SPACE); });
  m.def("empty_cache", [] { device_memory.emptyCache(); });
  m.def("set_timing", [](int timing, uint64_t seed) {
    Lock lock;
    world().timing = timing;
    world().random.seed(seed);
  });
  m.def("set_rate", [](double rate) { world().rate = rate; });
  m.def("fail", [](const std::string& what, int64_t after) {
    Lock lock;
    auto& w = world();
    std::map<std::string, int64_t*> all{
        {"allocation", &w.fail_allocation},
        {"launch", &w.fail_launch},
        {"register", &w.fail_register},
        {"unregister", &w.fail_unregister}};
    *all.at(what) = after;
  });
  m.def("set_pin_limit", [](size_t limit) { world().pin_limit = limit; });
  m.def("pinned", [] {
    std::map<uintptr_t, size_t> found;
    for (auto& [start, host] : world().pinned)
      if (!host.ours)
        found[start] = host.length;
    return found;
  });
  m.def("contexts", [] {
    std::vector<int> found;
    for (int i = 0; i < world().devices; i++)
      if (world().memory[i].context)
        found.push_back(i);
    return found;
  });
  m.def("forget_contexts", [] {
    for (auto& one : world().memory)
      one.context = false;
  });
  m.def("counts", [] { return world().counts; });
  m.def("resize_storage", resize_storage);
  m.def("clear_counts", [] { world().counts.clear(); });
  m.def("take_faults", [] { return std::exchange(world().faults, {}); });
  m.def("forked", [] { return world().forked; });
  m.def("pending", [] {
    Lock lock;
    size_t found = 0;
    for (auto& [key, q] : world().queues)
      for (auto& op : q->ops)
        found += op.run != nullptr;
    return found;
  });
  m.def("run_later", [](py::function work) {
    Lock lock;
    launch();
    auto kept = std::shared_ptr<py::function>(new py::function(std::move(work)), [](py::function* one) {
      py::gil_scoped_acquire gil;
      delete one;
    });
    Op op;
    op.run = [kept] {
      py::gil_scoped_acquire gil;
      (*kept)();
    };
    enqueue(current(current_device), std::move(op));
  });
  m.def("on_host", [](const at::Tensor& t) {
    Lock lock;
    return host_view(t);
  });
}
