"""`kvbench help snapkv`: what one method, task, model, ... is, and each of its settings.

Type, range and unit of a setting come from the class that declares and checks them.
"""

import inspect
import re
import textwrap
from pathlib import Path

from kvbench.cli import glossary, texts
from kvbench.config import extensions, files, shorthand
from kvbench.errors import NameUnknown, did_you_mean


def help_for(words: list[str], width: int = 80) -> str:
    """Answer `kvbench help WORD ...`.

    A word is a command, a group (`methods`), a name in a group (`snapkv`), or both (`method=snapkv`).
    """
    return "\n\n".join(_one(word, width) for word in words)


def _one(word: str, width: int) -> str:
    group, sign, name = word.partition("=")
    if sign and group in files.GROUPS:
        groups = [group] if name in files.options(group) else []
        names, known = name, files.options(group)
    else:
        if word == "glossary":
            return glossary.glossary(width)
        if word == "columns":
            from kvbench.show.columns import explained

            return explained(width)
        if word in texts.commands() or word in texts.moved():
            return texts.command_help(word, width)
        if {word, word.removesuffix("s")} & files.all_groups().keys():
            return texts.list_text([word], width)
        groups = [group for group in (*files.all_groups(), "launcher") if word in files.options(group)]
        names = word
        known = texts.commands() | {name: "" for group in files.GROUPS for name in files.options(group)}
    if not groups and (lines := _of_word(word, width)):
        return "\n".join(lines)
    if not groups:
        raise NameUnknown(
            f"there is no help for {word}.{did_you_mean(names, known)} `kvbench list` shows what there is"
        )
    return "\n\n".join(choice_help(group, names, width) for group in groups)


def _of_word(word: str, width: int) -> list[str]:
    """The meaning of a word, and the choices that have a setting of that name."""
    lines = glossary.meaning(word, glossary.GLOSSARY[word], width) if word in glossary.GLOSSARY else []
    for group in ("method", "task", "protocol", "model"):
        if names := [name for name in files.options(group) if word in shorthand.settings_of(group, name)]:
            shown = f"{group}.{word}= is a setting of {group}={' '.join(names)}; `kvbench help {names[0]}` says more"
            lines += _wrap(shown, width, "  ")
    return lines


def choice_help(group: str, name: str, width: int = 80) -> str:
    """Explain one choice of a group, and its settings."""
    if group == "method":
        return method_help(name, width)
    path = files.path_of(group, name)
    if group in ("task", "protocol"):
        return declared_help(group, name, path, width)
    text = path.read_text(encoding="utf-8")
    about = texts.purpose(text, width)
    title, scope = f"{group}={name}", f"settings ({group}.KEY=VALUE)"
    if "@package _global_" in text:
        scope = "settings"
    elif group in extensions.groups():
        scope = "its lines, of which every task goes through every method"
    elif group == "launcher":
        title, scope = f"hydra/{title}", "settings ; the plugin has more"
    settings = texts.settings_text(text, width, ("defaults:",))
    return f"{title}\n\n{about}\n\n{scope}\n{settings}"


def declared_help(group: str, name: str, path: Path, width: int) -> str:
    """Explain a task or a protocol: its purpose, and its settings with default, type, range, unit and meaning."""
    from kvbench.config.settings import read_config
    from kvbench.rules import declared
    from kvbench.tasks import settings_class
    from kvbench.tasks.protocol import Protocol

    text = path.read_text(encoding="utf-8")
    content = read_config(path)
    settings = content.get(group, content)  # a file may set more than its group, which then lies in it
    rules = declared(Protocol if group == "protocol" else settings_class(settings))
    lines = [f"{group}={name}", "", *texts.purpose(text, width).splitlines(), "", f"settings ({group}.KEY=VALUE)"]
    for key, value, meaning in re.findall(r"^ *(\w+): *(.*?)(?: +# (.*))?$", text, re.MULTILINE):
        if key in rules:
            lines += _setting(key, value, rules[key].text, meaning, width)
    if settings is not content:
        _, _, others = text.partition(f"\n{group}:")
        others = "\n".join(re.split(r"\n(?=\w)", others)[1:])
        lines += ["", "it sets, too", texts.settings_text(others, width)]
    if re.search(r"^defaults:", text, re.MULTILINE):
        lines += ["", *_wrap(f"the other settings are those of {group}=default", width)]
    return "\n".join(lines)


def method_help(name: str, width: int = 80) -> str:
    """Explain a method: its settings with type, range, unit and default, its source, and where it differs."""
    from kvbench.cli import method_table
    from kvbench.config.methods import method_settings
    from kvbench.rules import declared
    from kvbench.runs.parts import make_policy

    path = files.path_of("method", name)
    policy = make_policy(method_settings(name))
    kind = type(policy)
    doc = inspect.getdoc(kind) or ""
    listed, meaning, rules = method_table.settings_of(name), method_table.meanings(kind), declared(kind)
    lines = [f"method={name}", "", *_wrap(doc.split("\n\nArgs:")[0], width), "", "settings (method.KEY=VALUE)"]
    # The file's settings first, in its order; then those that it leaves to the class.
    for key in [*(key for key in listed if key in rules), *(key for key in rules if key not in listed)]:
        default = listed[key] if key in listed else getattr(policy, key)
        lines += _setting(key, method_table.yaml_value(default), rules[key].text, meaning.get(key, ""), width)
    calibrated = "a file that `kvbench calibrate` wrote; its settings replace these"
    lines += _setting("calibration", method_table.yaml_value(listed.get("calibration")), calibrated, "", width)
    sources = "; ".join(re.findall(r"^# source: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    about = {
        "scores by": re.sub(r"^none \((.*)\)$", r"\1", method_table.scored(policy)),  # of attention
        "acts": method_table.acts(policy),
        "memory of a KV head, bytes": method_table.memory(policy),
        "source": method_table.section(doc, "Source") or sources or "not said",
        "differs": method_table.section(doc, "Differs") or "not said",
    }
    for more in extensions.hooks("method.help"):
        about |= more(policy)
    about["defaults"] = str(path)
    for title, text in about.items():
        lines += ["", *_wrap(f"{title}: {text}", width)]
    return "\n".join(lines)


def _setting(key: str, value: str, rule: str, meaning: str, width: int) -> list[str]:
    return [f"  {key}={value}", *_wrap(rule, width, "      "), *_wrap(meaning, width, "      ")]


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    words = " ".join(text.split())
    return textwrap.wrap(
        words, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
