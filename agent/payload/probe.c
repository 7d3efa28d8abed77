// Runs a module the way crun does: libwasmedge.so.0 by dlopen, its WASI, the interpreter. Part of check.sh.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <wasmedge/wasmedge.h>

// (module
//   (import "wasi_snapshot_preview1" "fd_write" (func (param i32 i32 i32 i32) (result i32)))
//   (memory (export "memory") 1)
//   (data (i32.const 0) "\08\00\00\00\0d\00\00\00a module ran\n")
//   (func (export "_start") (drop (call 0 (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 32)))))
static const uint8_t module[] = {
  0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00, 0x01, 0x0c, 0x02, 0x60,
  0x04, 0x7f, 0x7f, 0x7f, 0x7f, 0x01, 0x7f, 0x60, 0x00, 0x00, 0x02, 0x23,
  0x01, 0x16, 0x77, 0x61, 0x73, 0x69, 0x5f, 0x73, 0x6e, 0x61, 0x70, 0x73,
  0x68, 0x6f, 0x74, 0x5f, 0x70, 0x72, 0x65, 0x76, 0x69, 0x65, 0x77, 0x31,
  0x08, 0x66, 0x64, 0x5f, 0x77, 0x72, 0x69, 0x74, 0x65, 0x00, 0x00, 0x03,
  0x02, 0x01, 0x01, 0x05, 0x03, 0x01, 0x00, 0x01, 0x07, 0x13, 0x02, 0x06,
  0x6d, 0x65, 0x6d, 0x6f, 0x72, 0x79, 0x02, 0x00, 0x06, 0x5f, 0x73, 0x74,
  0x61, 0x72, 0x74, 0x00, 0x01, 0x0a, 0x0f, 0x01, 0x0d, 0x00, 0x41, 0x01,
  0x41, 0x00, 0x41, 0x01, 0x41, 0x20, 0x10, 0x00, 0x1a, 0x0b, 0x0b, 0x1b,
  0x01, 0x00, 0x41, 0x00, 0x0b, 0x15, 0x08, 0x00, 0x00, 0x00, 0x0d, 0x00,
  0x00, 0x00, 0x61, 0x20, 0x6d, 0x6f, 0x64, 0x75, 0x6c, 0x65, 0x20, 0x72,
  0x61, 0x6e, 0x0a
};

#define SYMBOL(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(library, #name); \
  if (!p_##name) { fprintf(stderr, "%s\n", dlerror()); return 1; }

int main(void) {
  void *library = dlopen("libwasmedge.so.0", RTLD_NOW);
  if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
  SYMBOL(WasmEdge_ConfigureCreate)
  SYMBOL(WasmEdge_ConfigureAddHostRegistration)
  SYMBOL(WasmEdge_VMCreate)
  SYMBOL(WasmEdge_VMGetImportModuleContext)
  SYMBOL(WasmEdge_ModuleInstanceInitWASI)
  SYMBOL(WasmEdge_StringCreateByCString)
  SYMBOL(WasmEdge_VMRunWasmFromBuffer)
  SYMBOL(WasmEdge_ResultOK)
  SYMBOL(WasmEdge_ResultGetMessage)

  WasmEdge_ConfigureContext *configure = p_WasmEdge_ConfigureCreate();
  p_WasmEdge_ConfigureAddHostRegistration(configure, WasmEdge_HostRegistration_Wasi);
  WasmEdge_VMContext *vm = p_WasmEdge_VMCreate(configure, NULL);
  WasmEdge_ModuleInstanceContext *wasi = p_WasmEdge_VMGetImportModuleContext(vm, WasmEdge_HostRegistration_Wasi);
  const char *args[] = {"/probe.wasm"};
  p_WasmEdge_ModuleInstanceInitWASI(wasi, args, 1, NULL, 0, NULL, 0);
  WasmEdge_Result result = p_WasmEdge_VMRunWasmFromBuffer(vm, module, sizeof module, p_WasmEdge_StringCreateByCString("_start"), NULL, 0, NULL, 0);
  if (!p_WasmEdge_ResultOK(result)) { fprintf(stderr, "%s\n", p_WasmEdge_ResultGetMessage(result)); return 1; }
  return 0;
}
