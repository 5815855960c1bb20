/* A device guard for cuda:0 and others: without one a torch that was built for the CPU refuses to slice such tensors. */
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
const c10::Device CARD(c10::DeviceType::CUDA, 0);

struct CardGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::Device exchangeDevice(c10::Device) const override { return CARD; }
    c10::Device getDevice() const override { return CARD; }
    c10::DeviceIndex deviceCount() const noexcept override { return 16; }
};
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new CardGuard());
} // namespace
