"""`kvbench help snapkv`: what one method, task, model, ... is, and each of its settings.

Type, range and unit of a setting come from the class that declares and checks them.
"""

import inspect
import re
import textwrap
from pathlib import Path

from kvbench.cli import glossary, texts
from kvbench.config import extensions, files, shorthand
from kvbench.config.calibrated import AUTO, of_method
from kvbench.errors import NameUnknown, did_you_mean

WHOLE = "all=true"  # the word after which nothing is left out
_SHORT_LINES = 5  # of the differences of a method, where not all is shown


def help_for(words: list[str], width: int = 80) -> str:
    """Answer `kvbench help WORD ...`.

    A word is a command, a group (`methods`), a name in a group (`snapkv`), or both (`method=snapkv`); with `all=true`
    whatever else bears the name, and a method's inherited settings.
    """
    whole = WHOLE in words
    return "\n\n".join(_one(word, width, whole) for word in words if word != WHOLE)


def _one(word: str, width: int, whole: bool) -> str:
    group, sign, name = word.partition("=")
    if sign and group in files.all_groups():
        groups = [group] if name in files.options(group) else []
        names, known = name, files.options(group)
    else:
        if word == "glossary":
            return glossary.glossary(width)
        if word == "columns":
            from kvbench.evidence import legends
            from kvbench.show.columns import explained

            return f"{explained(width)}\n{legends.explained(width)}"
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
    # Choices of extensions with the name of a method are only named: a paper's suite would bury the method.
    shown = [group for group in groups if whole or group in files.GROUPS or group == groups[0]]
    lines = [line for group in groups if group not in shown for line in _pointer(group, names, width)]
    return "\n\n".join(
        [*(choice_help(group, names, width, whole) for group in shown), *filter(None, ["\n".join(lines)])]
    )


def _pointer(group: str, name: str, width: int) -> list[str]:
    return _wrap(f"{group}={name}: {files.options(group)[name]} `kvbench help {group}={name}` says more", width)


def _of_word(word: str, width: int) -> list[str]:
    """The meaning of a word, and the choices that have a setting of that name."""
    lines = glossary.meaning(word, glossary.GLOSSARY[word], width) if word in glossary.GLOSSARY else []
    for group in ("method", "task", "protocol", "model"):
        if names := [name for name in files.options(group) if word in shorthand.settings_of(group, name)]:
            shown = f"{group}.{word}= is a setting of {group}={' '.join(names)}; `kvbench help {names[0]}` says more"
            lines += _wrap(shown, width, "  ")
    return lines


def choice_help(group: str, name: str, width: int = 80, whole: bool = True) -> str:
    """Explain one choice of a group, and its settings."""
    if group == "method":
        return method_help(name, width, whole)
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


def method_help(name: str, width: int = 80, whole: bool = True) -> str:
    """Explain a method: what it keeps, its settings, its memory, its source, and its differences.

    Settings stand with type, range, unit and default.

    Args:
        name: A choice of `method`.
        width: Columns of a line.
        whole: False = settings that its file does not list are named in a line, and what is long is cut: ranges,
            meanings of settings that several methods have, and differences.
    """
    from kvbench.cli import method_table
    from kvbench.config.methods import method_settings
    from kvbench.rules import declared
    from kvbench.runs.parts import make_policy

    path = files.path_of("method", name)
    policy = make_policy(method_settings(name))
    kind = type(policy)
    doc = inspect.getdoc(kind) or ""
    listed, explained = method_table.settings_of(name), method_table.explained(kind)
    rules = {key: each.text for key, each in declared(kind).items()}
    lines = [f"method={name}", "", *_wrap(doc.split("\n\nArgs:")[0], width), "", "settings (method.KEY=VALUE)"]
    # The file's settings first, in its order; then those that it leaves to the class.
    inherited = [key for key in rules if key not in listed]
    first: dict[str, str] = {}  # rule -> the setting at which it stands
    for key in [*(key for key in listed if key in rules), *(inherited if whole else [])]:
        default = listed[key] if key in listed else getattr(policy, key)
        owner, meaning = explained.get(key, (kind, ""))
        known, rule = first.setdefault(rules[key], key), rules[key]
        if known != key and len(rule) > width // 2:
            rule = f"as {known}="
        elif not whole:
            rule = textwrap.shorten(rule, 2 * width - 12, placeholder=" ...")
            meaning = _beginning(meaning, width, "...") if method_table.is_contract(owner) else meaning
        lines += _setting(key, method_table.yaml_value(default), rule, meaning, width)
    calibrated = "a file that `kvbench calibrate` wrote, whose settings replace these; auto = the shipped one, or null"
    models = [content["model"]["name"] for _, content in of_method(f"{kind.__module__}.{kind.__qualname__}")]
    shipped = f"Shipped for {', '.join(models)}." if models else ""
    lines += _setting(
        "calibration", method_table.yaml_value(listed.get("calibration", AUTO)), calibrated, shipped, width
    )
    more = f"`kvbench help method={name} {WHOLE}`"
    if inherited and not whole:
        lines += ["", *_wrap(f"{more} explains {len(inherited)} more: {', '.join(inherited)}", width, "  ")]
    sources = "; ".join(re.findall(r"^# source: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    differs = method_table.section(doc, "Differs") or "not said"
    about = {
        "memory of a KV head, bytes": method_table.memory(policy),
        "scores by": re.sub(r"^none \((.*)\)$", r"\1", method_table.scored(policy)),  # of attention
        "acts": method_table.acts(policy),
    }
    for facts in extensions.hooks("method.help"):
        about |= facts(policy)
    about["defaults"] = str(path)
    about["source"] = method_table.section(doc, "Source") or sources or "not said"
    about["differs"] = differs if whole else _beginning(differs, _SHORT_LINES * width, f"({more} has the rest)")
    return "\n".join(
        [*lines, "", *(line for title, text in about.items() for line in _wrap(f"{title}: {text}", width))]
    )


def _beginning(text: str, length: int, end: str) -> str:
    """The first sentences of a text, as many as have room, and what to end with where some are left out."""
    if len(text) <= length:
        return text
    sentences = re.split(r"(?<=[.;:)]) ", text)
    taken = sentences[0]
    for sentence in sentences[1:]:
        if len(taken) + len(sentence) + len(end) > length:
            break
        taken += f" {sentence}"
    return f"{taken} {end}"


def _setting(key: str, value: str, rule: str, meaning: str, width: int) -> list[str]:
    head = f"  {key}={value}"
    if len(head) + 2 + len(rule) <= width:
        return [f"{head}  {rule}", *_wrap(meaning, width, "      ")]
    return [head, *_wrap(rule, width, "      "), *_wrap(meaning, width, "      ")]


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    words = " ".join(text.split())
    return textwrap.wrap(
        words, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
