"""The colours, markers and hatches of all pictures.

Okabe and Ito's palette, with black for its yellow, which white paper swallows: told apart with every kind of colour
blindness. Markers, lines and hatches say the same in black and white.
"""

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#999999"

# In pictures of few runs and in bars.
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, BLACK, GREY)
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "")
STYLES = ("-", "--", ":")

# Of the methods in one panel of a frontier: thin lines and small marks, so the strongest colours come first.
PANEL_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK)
PANEL_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
