"""Command `engine`: translation of a serving engine's flags."""

import shlex

from omegaconf import DictConfig
from rich.text import Text

from kvbench.errors import SettingMissing
from kvbench.extensions.advise.engines import read_command
from kvbench.extensions.advise.saves import answer
from kvbench.show import terminal
from kvbench.show.text import safe

LONGEST = 2000  # of a command line that is shown


def main(cfg: DictConfig) -> int:
    """Print the setting of an engine's command, its saving and known loss; run it where settings of a run are given."""
    if not cfg.command:
        raise SettingMissing(
            'give the command of an engine in quotes: kvbench engine "llama-server -ctk q8_0 -ctv q8_0"',
            setting="command",
        )
    reading = read_command(str(cfg.command))
    run_words = [] if cfg.run is None else shlex.split(str(cfg.run))
    changed = {word.partition("=")[0] for word in run_words}
    words = [word for word in reading.words if word.partition("=")[0] not in changed]
    if "model" in changed:  # another model, with settings of its own
        words = [word for word in words if not word.startswith("model.")]
    words += run_words
    console = terminal.console(100)
    console.print(Text(safe(shlex.join(["kvbench", *words]), LONGEST)), soft_wrap=True)
    for line in answer(words, reading.context_tokens):
        console.print(Text(safe(line, LONGEST)))
    for note in reading.notes:
        console.print(Text(safe(note, LONGEST), style="dim"), soft_wrap=True)
    if cfg.run is None:
        console.print(Text('run="task=longctx limit=8" measures it on your model.', style="dim"))
        return 0
    from kvbench.cli.main import main as command

    return command(words)
