"""Matmul throughput, measured with events and overlapped with copies on a second stream."""

import argparse
import time

import torch


def benchmark_cuda(n, iterations, warmup, dtype):
    a = torch.randn(n, n, device="cuda", dtype=dtype)
    b = torch.randn(n, n, device="cuda", dtype=dtype)
    for _ in range(warmup):
        torch.matmul(a, b)
    torch.cuda.synchronize()

    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    start_event.record()
    for _ in range(iterations):
        c = a @ b
    end_event.record()
    torch.cuda.synchronize()
    assert end_event.query()
    elapsed_ms = start_event.elapsed_time(end_event)
    return c, elapsed_ms / 1000 / iterations


def benchmark_cpu(n, iterations, warmup, dtype):
    a = torch.randn(n, n, dtype=dtype)
    b = torch.randn(n, n, dtype=dtype)
    for _ in range(warmup):
        torch.matmul(a, b)
    start = time.perf_counter()
    for _ in range(iterations):
        c = a @ b
    return c, (time.perf_counter() - start) / iterations


def overlap(n):
    """Copy the next batch on a side stream while the present one is used."""
    copy_stream = torch.cuda.Stream()
    batches = [torch.full((n, n), float(i)).pin_memory() for i in range(3)]
    done = torch.cuda.Event()
    total = torch.zeros((), device="cuda")
    with torch.cuda.stream(copy_stream):
        upcoming = batches[0].cuda(non_blocking=True)
        done.record(copy_stream)
    for i in range(len(batches)):
        torch.cuda.current_stream().wait_event(done)
        current = upcoming
        current.record_stream(torch.cuda.current_stream())
        if i + 1 < len(batches):
            copy_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copy_stream):
                upcoming = batches[i + 1].cuda(non_blocking=True)
                done.record()
        total += (current * 2).sum()
    torch.cuda.current_stream().wait_stream(copy_stream)
    copy_stream.synchronize()
    return total.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(0)
        print(f"# {torch.cuda.get_device_name(torch.cuda.current_device())}, CUDA {torch.version.cuda}")
        torch.cuda.nvtx.range_push("benchmark")
    run = benchmark_cuda if use_cuda else benchmark_cpu
    c, seconds = run(args.n, args.iterations, args.warmup, dtype)
    if use_cuda:
        torch.cuda.nvtx.range_pop()
    assert seconds > 0
    flops = 2 * args.n**3
    print(f"# {seconds * 1e6:.1f} us, {flops / seconds / 1e12:.6f} TFLOPS")
    print(f"checksum {c.double().abs().mean().item():.6f}")
    overlapped = overlap(args.n) if use_cuda else sum(2.0 * i * args.n**2 for i in range(3))
    print(f"overlap {overlapped:.1f}")


if __name__ == "__main__":
    main()
