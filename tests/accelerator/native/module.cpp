// Registers the late device with torch, and gives Python what torch has no interface for: limit, pins, races, lateness.
#include <torch/csrc/utils/pybind.h>

#include "kernels.h"

namespace late {

static bool g_tells_where = false;

// The Python frames below a race. Off by default: the interpreter's lock is taken here with ours held, and a thread that frees a
// tensor holds them the other way round.
static std::string python_stack() {
  std::string text;
  if (!g_tells_where) return text;
  pybind11::gil_scoped_acquire interpreter;
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame && depth < 12; ++depth) {
    auto* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* function = PyUnicode_AsUTF8(code->co_name);
    text += c10::str("\n    ", file ? file : "?", ":", PyFrame_GetLineNumber(frame), " ", function ? function : "?");
    Py_DECREF(code);
    auto* up = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = up;
  }
  Py_XDECREF(frame);
  return text;
}

size_t note(LateStream& stream, const std::vector<Touch>& touches, const std::string& what) {
  Guarded lock(everything());
  size_t added = Races::all().note(stream.number, stream.clock, touches, what);
  if (added) Races::all().tell_last(python_stack());
  return added;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_local_scalar_dense", item);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// torch resolves a conjugated tensor by cloning it, which copies it: the copy takes it as it is.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace late
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::choose_attention)
}
namespace late {

using at::autocast::CastPolicy;
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LATE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LATE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LATE_LOWER)
  AT_FORALL_FP32(LATE_FP32)
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

static void install() {
  c10::SetAllocator(kType, &Allocator::one());
  at::setHostAllocator(kType, &HostAllocator::one());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& name : composed_elsewhere()) library->impl(c10::toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace late

PYBIND11_MODULE(late_native, m) {
  using namespace late;
  install();
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return t_device; });
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(kType, device)); });
  m.def("total_bytes", [] { return kTotalBytes; });
  m.def("limit_bytes", [](int device) { return pool(device).limit_bytes; });
  m.def("set_limit_bytes", [](int device, size_t nbytes) { Guarded lock(everything()); pool(device).limit_bytes = nbytes; });
  m.def("pin", &pin);
  m.def("unpin", &unpin);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("get_rng_state", [](int device) { return at::Tensor(default_generator(device).unsafeGetGeneratorImpl()->get_state()); });
  m.def("set_rng_state", [](int device, const at::Tensor& state) { default_generator(device).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl()); });
  m.def("manual_seed", [](int device, uint64_t seed) { default_generator(device).unsafeGetGeneratorImpl()->set_current_seed(seed); });

  m.def("check_races", [](bool on) { Races::all().begin(on); });
  m.def("tell_where", [](bool on) { g_tells_where = on; });
  m.def("races", [] { Guarded lock(everything()); return Races::all().found(); });
  m.def("set_lateness", [](const std::string& mode, uint32_t seed) {
    Guarded lock(everything());
    TORCH_CHECK(mode == "latest" || mode == "prompt" || mode == "random", "late: lateness is latest, prompt or random, not ", mode);
    Streams::all().lateness = mode == "latest" ? Lateness::latest : mode == "prompt" ? Lateness::prompt : Lateness::random;
    Streams::all().generator.seed(seed);
  });
  m.def("set_links", [](double to_device, double to_host, const std::string& pace) {
    Guarded lock(everything());
    TORCH_CHECK(pace == "none" || pace == "slept" || pace == "counted", "late: links are slept or counted, or none, not ", pace);
    auto& timing = Timing::all();
    Streams::all().begin(pace == "none" ? Pace::none : pace == "slept" ? Pace::slept : Pace::counted);
    timing.bytes_per_s[0] = to_device;
    timing.bytes_per_s[1] = to_host;
  });
  m.def("now_s", [] { return Timing::all().now_s(); });
  m.def("worked_s", [] {
    Guarded lock(everything());
    auto& timing = Timing::all();
    return std::map<std::string, double>{{"to device", timing.link_s[0]}, {"to host", timing.link_s[1]}, {"compute", timing.compute_s}};
  });
  m.def("counts", [] {
    Guarded lock(everything());
    return std::map<std::string, uint64_t>{{"tasks", Streams::all().tasks}, {"late_copies", Streams::all().late_copies}};
  });
  m.def("launched", [] { Guarded lock(everything()); return launched(); });
}
