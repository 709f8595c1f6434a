"""How long a thousand simulated replicas take: python benchmarks/fleet.py [replicas] [seconds of load]."""

import sys
import time

import contbatch as cb


def main(replicas: int = 1000, seconds: float = 1.0) -> None:
    """Serve 100 short requests a second and replica, and print what it took."""
    num_requests = int(100 * replicas * seconds)
    prompt, output = cb.lengths.Uniform(16, 128), cb.lengths.Uniform(1, 16)
    load = cb.Poisson(rate=100 * replicas, num_requests=num_requests, prompt=prompt, output=output)
    gpu = cb.Simulated(gpu="H100", model="llama-3-8b")
    began = time.perf_counter()
    fleet = cb.simulate_fleet(load, replicas, cb.PowerOfTwo(), None, gpu, num_pages=1024, detail=False)
    took = time.perf_counter() - began
    figures = fleet.summary()
    print(
        f"{replicas} replicas, {num_requests} requests at {100 * replicas}/s, {figures.steps:.0f} steps: {took:.0f} s; "
        f"TTFT p99 {1e3 * figures.ttft_s_p99:.1f} ms, imbalance {figures.imbalance:.2f}"
    )


if __name__ == "__main__":
    main(*(int(sys.argv[1]), float(sys.argv[2])) if len(sys.argv) > 2 else ())
