// Loaded before torch (LD_PRELOAD): two functions that a CPU build of torch has fixed answers for.
//
// Which accelerator there is was decided when torch was compiled, and the hooks of CUDA are looked up once, while torch
// is imported, so before ``device.cpp`` can be loaded.

#include <dlfcn.h>

#include <cstdint>
#include <optional>

namespace c10 {
enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };
}

extern "C" {
__attribute__((visibility("default"))) const void* fake_cuda_hooks = nullptr; // set by device.cpp
}

static void* torchs_own(const char* name) { // Python loads torch where RTLD_NEXT does not look
  return dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), name);
}

namespace at {

struct CUDAHooksInterface;

namespace accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool checked) {
  if (fake_cuda_hooks)
    return c10::DeviceType::CUDA;
  using Function = std::optional<c10::DeviceType> (*)(bool);
  return ((Function)torchs_own("_ZN2at11accelerator14getAcceleratorEb"))(checked);
}
} // namespace accelerator

namespace detail {
__attribute__((visibility("default"))) const CUDAHooksInterface& getCUDAHooks() {
  if (fake_cuda_hooks)
    return *(const CUDAHooksInterface*)fake_cuda_hooks;
  using Function = const CUDAHooksInterface& (*)();
  return ((Function)torchs_own("_ZN2at6detail12getCUDAHooksEv"))();
}
} // namespace detail

} // namespace at
