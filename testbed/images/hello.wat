;; hello-wasm: says which host it runs on ($HOSTNAME, as CRI gives it to every container) and with which arguments.
;;
;; Memory: strings and the iovec below 4096, pointers from 4096, argument bytes from 65536, environment bytes from
;; 131072; a container with more than 64 KiB of either is not what this image is for, and gets "?" for it.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_sizes_get" (func $args_sizes_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_get" (func $args_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "environ_sizes_get" (func $environ_sizes_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "environ_get" (func $environ_get (param i32 i32) (result i32)))
  (memory (export "memory") 4)
  (data (i32.const 64) "hello from WebAssembly on ")
  (data (i32.const 96) "HOSTNAME=")
  (data (i32.const 112) "arguments:")
  (data (i32.const 128) "\n")
  (data (i32.const 132) " ")
  (data (i32.const 136) "?\00")

  (func $write (param $at i32) (param $length i32)
    (i32.store (i32.const 0) (local.get $at))
    (i32.store (i32.const 4) (local.get $length))
    (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))))

  (func $length (param $string i32) (result i32)
    (local $at i32)
    (local.set $at (local.get $string))
    (block $end
      (loop $next
        (br_if $end (i32.eqz (i32.load8_u (local.get $at))))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (br $next)))
    (i32.sub (local.get $at) (local.get $string)))

  ;; Whether $string begins with "HOSTNAME=".
  (func $names_the_host (param $string i32) (result i32)
    (local $at i32)
    (loop $next
      (if (i32.ne
            (i32.load8_u (i32.add (local.get $string) (local.get $at)))
            (i32.load8_u (i32.add (i32.const 96) (local.get $at))))
        (then (return (i32.const 0))))
      (local.set $at (i32.add (local.get $at) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $at) (i32.const 9))))
    (i32.const 1))

  ;; The value of HOSTNAME, or "?".
  (func $host (result i32)
    (local $index i32) (local $string i32)
    (if (call $environ_sizes_get (i32.const 16) (i32.const 20)) (then (return (i32.const 136))))
    (if (i32.gt_u (i32.load (i32.const 16)) (i32.const 15360)) (then (return (i32.const 136))))
    (if (i32.gt_u (i32.load (i32.const 20)) (i32.const 65536)) (then (return (i32.const 136))))
    (if (call $environ_get (i32.const 4096) (i32.const 131072)) (then (return (i32.const 136))))
    (block $end
      (loop $next
        (br_if $end (i32.ge_u (local.get $index) (i32.load (i32.const 16))))
        (local.set $string (i32.load (i32.add (i32.const 4096) (i32.mul (local.get $index) (i32.const 4)))))
        (if (call $names_the_host (local.get $string))
          (then (return (i32.add (local.get $string) (i32.const 9)))))
        (local.set $index (i32.add (local.get $index) (i32.const 1)))
        (br $next)))
    (i32.const 136))

  (func $arguments
    (local $index i32) (local $string i32)
    (if (call $args_sizes_get (i32.const 16) (i32.const 20)) (then (return)))
    (if (i32.gt_u (i32.load (i32.const 16)) (i32.const 15360)) (then (return)))
    (if (i32.gt_u (i32.load (i32.const 20)) (i32.const 65536)) (then (return)))
    (if (call $args_get (i32.const 4096) (i32.const 65536)) (then (return)))
    (block $end
      (loop $next
        (br_if $end (i32.ge_u (local.get $index) (i32.load (i32.const 16))))
        (local.set $string (i32.load (i32.add (i32.const 4096) (i32.mul (local.get $index) (i32.const 4)))))
        (call $write (i32.const 132) (i32.const 1))
        (call $write (local.get $string) (call $length (local.get $string)))
        (local.set $index (i32.add (local.get $index) (i32.const 1)))
        (br $next))))

  (func (export "_start")
    (local $host i32)
    (call $write (i32.const 64) (i32.const 26))
    (local.set $host (call $host))
    (call $write (local.get $host) (call $length (local.get $host)))
    (call $write (i32.const 128) (i32.const 1))
    (call $write (i32.const 112) (i32.const 10))
    (call $arguments)
    (call $write (i32.const 128) (i32.const 1))))
