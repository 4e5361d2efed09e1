"""EvalPlus' own verdicts on programs; runs in an environment of its own that has the package `evalplus`.

Reads one JSON object from standard input: `dataset` (`humaneval` or `mbpp`), `rows` (of the release file) and
`programs` (pairs of a row's number and a program). Writes one pair of booleans (base, plus) for each program.
"""

import copy
import json
import sys

from evalplus.data.mbpp import mbpp_deserialize_inputs
from evalplus.eval import untrusted_check
from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
from evalplus.gen.util import trusted_exec


def main() -> None:
    """Judge all programs, one after the other."""
    job = json.load(sys.stdin)
    expected: dict = {}
    verdicts = []
    for number, program in job["programs"]:
        row = job["rows"][number]
        if number not in expected:
            groups = [row["base_input"], row["plus_input"] or []]
            if job["dataset"] == "mbpp":
                groups = [mbpp_deserialize_inputs(row["task_id"], group) for group in groups]
            solution = row["prompt"] + row["canonical_solution"]
            found = job["dataset"] == "mbpp" and row["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS
            more = {"record_time": True, "output_not_none": found}
            expected[number] = [
                (group, *trusted_exec(solution, copy.deepcopy(group), row["entry_point"], **more)) for group in groups
            ]
        verdicts.append(
            [
                untrusted_check(
                    job["dataset"],
                    program,
                    copy.deepcopy(inputs),
                    row["entry_point"],
                    expected=outputs,
                    atol=row["atol"],
                    ref_time=times,
                    fast_check=True,
                )[0]
                == "pass"
                for inputs, outputs, times in expected[number]
            ]
        )
    json.dump(verdicts, sys.stdout)


if __name__ == "__main__":
    main()
