"""The colours, markers and hatches of all pictures.

Okabe and Ito's palette, with black for its yellow, which white paper swallows: told apart with every kind of colour
blindness. Markers, lines and hatches say the same in black and white.
"""

from zlib import crc32

from kvbench.config.files import FULL

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#999999"

# In pictures of few runs and in bars.
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, BLACK, GREY)
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "")
STYLES = ("-", "--", ":")

# Of methods, whose names always stand at their lines: Okabe and Ito's strongest, then darker ones.
PURPLE, BROWN, OLIVE, TEAL, CRIMSON = "#5E3C99", "#7A4A12", "#7A7A00", "#01665E", "#B2182B"
METHOD_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, PURPLE, BROWN, OLIVE, TEAL, CRIMSON, GREY)
METHOD_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# The methods of this repository: those that are drawn together most often come first and have a colour of their own;
# those of the second row share it with a method of their kind, under another marker. A method from elsewhere takes its
# place by its name.
METHODS = (
    *("snapkv", "kivi", "h2o", "diffkv", "streaming_llm", "quest"),
    *("pyramidkv", "minikv", "ada_snapkv", "int4", "tova", "random"),
    *("kv_compress", "kvquant_style", "scissorhands", "diffkv_artifact", "duo_attention", "knorm"),
    *("ada_pyramidkv", "fp8", "leankv", "int8", "h2o_factory", "keydiff"),
    *("expected_attention", "chunkkv", "critical", "kvzip", "r_kv", "vatp"),
    *("lagkv", "cake", "headkv", "turboquant_4bit", "triattention", "keyformer"),
    *("simlayerkv", "dms", "fastgen", "pyramid_infer", "q_hitter", "zipcache"),
    *("random_trace", "kvpress", "nvfp4", "fp8_per_token_head", "turboquant_3bit", "int8_per_token_head"),
    *("turboquant_k8v4", "think", "kvquant"),
)
FULL_STYLE = (BLACK, "*")


def method_style(method: str) -> tuple[str, str]:
    """Colour and marker of a method: the same in every picture, and of this repository's methods its alone."""
    if method == FULL:
        return FULL_STYLE
    count = len(METHOD_COLOURS)
    own = len(METHODS)  # a method from elsewhere has no marker and colour of one from here
    rest = count * len(METHOD_MARKERS) - own
    place = METHODS.index(method) if method in METHODS else own + crc32(method.encode(errors="replace")) % rest
    row, column = divmod(place, count)
    return METHOD_COLOURS[column], METHOD_MARKERS[row]


# The items of the byte ledger, each with its own colour in every picture and on the report's page, there or not.
ITEMS = (
    *("payload_bytes", "quant_meta_bytes", "track_bytes", "slack_bytes", "residual_bytes", "residual_slack_bytes"),
    *("free_list_bytes", "table_bytes", "book_bytes"),
)


def item_place(name: str) -> int:
    """Place of the colour and hatch of `COLOURS` and `HATCHES` an item of the ledger, such as `slack_bytes`, has."""
    return ITEMS.index(name) if name in ITEMS else crc32(name.encode(errors="replace")) % len(COLOURS)
