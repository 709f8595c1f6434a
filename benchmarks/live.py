"""What the live picture takes from a run on the real model, in a notebook's kernel: printed in per cent of the run."""

import nbformat
from nbclient import NotebookClient

CODE = """
import platform
import contbatch as cb
from contbatch import live

made = []
class Counted(live.Live):
    def end(self, state):
        super().end(state)
        made.append(self)

live.Live = Counted
with cb.LLM("smollm2-135m") as llm:
    llm.generate("Hello", cb.SamplingParams(max_tokens=2), progress=False)  # compiles
    work = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=32, prompt=40, output=60)
    for policy in (cb.OneAtATime(), cb.ContinuousBatching()):
        load = work.replace(num_requests=4) if isinstance(policy, cb.OneAtATime) else work
        result = cb.run(cb.Experiment(workload=load, policy=policy, backend=llm, max_num_seqs=16), live=True)
        seconds, count, spent_s = result.duration_s, made[-1].num_pictures, made[-1].spent_s
        print(f"{policy}: {len(result.steps)} steps in {seconds:.1f} s, {count} pictures, "
              f"{1e3 * spent_s / count:.2f} ms each, {100 * spent_s / seconds:.2f} % of the run")
print(platform.machine())
"""


def main() -> None:
    """Run the code in a kernel and print what it prints."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=600, extra_arguments=["--IPKernelApp.log_level=40"]).execute()
    for output in notebook.cells[0].outputs:
        if output.output_type == "stream":
            print(output.text, end="")


if __name__ == "__main__":
    main()
