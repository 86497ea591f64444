"""What counts as the same answer: one table, which `math` holds, and of which other judges hold parts."""

import asyncio

import pytest

from tandem.api.failures import RewardFailure
from tandem.rewards.build import build_reward
from tandem.rewards.code import same_output

TABLE = r"""
# whole numbers, signs, separators: exact_number
18 | \boxed{18} | 1
18 | 18 | 1
18 | 18.0 | 1
18 | \boxed{18.} | 1
18 | 19 | 0
18 | -18 | 0
-7 | −7 | 1
-7 | \boxed{-7} | 1
-7 | 7 | 0
+5 | 5 | 1
007 | 7 | 1
025 | \boxed{25} | 1
1234 | 1,234 | 1
1,234,567 | \boxed{1234567} | 1
10,\!080 | 10080 | 1
11,\! 111,\! 111,\! 100 | \boxed{11111111100} | 1
58{,}500 | 58500 | 1
1234 | 1.234 | 0
12 | \boxed{1,2} | 0
18 | ５ | 0
5 | ５ | 1
# decimals and scientific notation: exact_number
0.5 | .5 | 1
0.5 | -0.5 | 0
-0.5 | -.5 | 1
0.5 | 0.50 | 1
0.5 | 0.05 | 0
3.14 | 3.15 | 0
3.14159 | 3.1416 | 0
0.00001 | 1e-05 | 1
1e-05 | 0.00001 | 1
1e-05 | \boxed{10^{-5}} | 1
1e-05 | $10^{-5}$ | 1
1e-05 | 10⁻⁵ | 1
1e-05 | \boxed{e-5} | 0
1e-05 | \boxed{5} | 0
1e-05 | \boxed{10^{-4}} | 0
1e6 | 1000000 | 1
1e6 | 1,000,000 | 1
10000000.0 | 10^7 | 1
1E+06 | \boxed{1 \times 10^6} | 1
1.5\times 10^{3} | 1500 | 1
1500 | 1.5 × 10³ | 1
1500 | 1.5*10^3 | 1
6.02e23 | 6.02 \cdot 10^{23} | 1
6.02e23 | 6.02e22 | 0
.0000672 | 6.72 \times 10^{-5} | 1
1e-05 | 1e999999999 | 0
# fractions and mixed numbers: exact_number
3/4 | 3/4 | 1
3/4 | 0.75 | 1
3/4 | \frac{3}{4} | 1
\frac34 | 3/4 | 1
\frac{3}{4} | \dfrac{3}{4} | 1
\frac{3}{4} | \tfrac34 | 1
\frac{3}{4} | 6/8 | 1
\frac{3}{4} | 4/3 | 0
\frac{3}{4} | -\frac{3}{4} | 0
-\frac{3}{4} | \frac{-3}{4} | 1
-\frac{3}{4} | \boxed{-0.75} | 1
\frac{1}{23} | \frac{12}{3} | 0
\frac{1}{3} | 0.33 | 0
\frac{1}{3} | 0.3333333 | 0
\frac{1}{2} | ½ | 1
0.5 | ½ | 1
1 1/2 | 3/2 | 1
3/2 | 1 1/2 | 1
3/2 | 1½ | 1
3/2 | 1\frac{1}{2} | 1
1\frac{4}{5} | 9/5 | 1
1\frac{4}{5} | \frac{4}{5} | 0
137 \frac{1}{2} | 137.5 | 1
-1 1/2 | -1.5 | 1
1 1/2 | 11/2 | 0
3/2 | 2/3 | 0
1/2 | 1/0 | 0
# percent and money: exact_number
12\% | 12 % | 1
12\% | 12% | 1
12 | 12% | 1
12\% | 12 | 1
12\% | 0.12 | 1
0.12 | 12% | 1
12\% | 13% | 0
0.5 | 0.5% | 0
12\% | 1.2 | 0
50\% | \boxed{50 \text{ percent}} | 1
\$18.90 | 18.90 | 1
\$18.90 | $18.9 | 1
\$32,\!348 | 32348 | 1
\$36 | 36 dollars | 1
36 | \boxed{\$36} | 1
\$36 | €36 | 0
\$36 | 36 cents | 0
5.4 \text{ cents} | 5.4 | 1
5.4 \text{ cents} | 5.4¢ | 1
2 million | 2000000 | 1
\$2.5 million | 2,500,000 dollars | 1
2 million | 2 billion | 0
# units, degrees, bases: exact_number
5 cm | 5 km | 0
5 cm | 5 | 1
5 | 5 cm | 1
5 cm | 5cm | 1
5 cm | 5 centimeters | 1
5\text{ cm} | \boxed{5 \mathrm{~cm}} | 1
5 cm | 6 cm | 0
5 \text{ hours} | 5 minutes | 0
5 \text{ hours} | 5 h | 1
15\mbox{ cm}^2 | 15 cm² | 1
15\mbox{ cm}^2 | 15 square centimeters | 1
15\mbox{ cm}^2 | 15 cm^3 | 0
15\mbox{ cm}^2 | 15 | 1
864 \mbox{ inches}^2 | \boxed{864 \text{ square inches}} | 1
60 \text{ miles per hour} | 60 miles/hour | 1
60 \text{ km/h} | 60 \text{ m/s} | 0
72 clips | \boxed{72} | 1
72 | 72 clips | 1
90^\circ | 90 | 1
90 | 90° | 1
90^\circ | 90 degrees | 1
90^\circ | 90 \text{ radians} | 0
\frac{270}7\text{ degrees} | \frac{270}{7}^\circ | 1
10_2 | 10_3 | 0
10_2 | 10_{2} | 1
52_8 | 52 | 1
52_8 | \boxed{52_{8}} | 1
52_8 | 52₈ | 1
52_8 | 52_9 | 0
52_8 | 42 | 0
5 Hz | 5 kHz | 0
5 GB | 5 MB | 0
5 kPa | 5 MPa | 0
5 kHz | 5 kilohertz | 1
5 rupees | 5 dollars | 0
5 hours | 5 total hours | 1
5 N | 5 | 1
0.5 m | 0.5 | 1
# a factor is no unit, and a unit ends with the first word that is none: exact_number
12 | 12ab | 0
5 | 5x | 0
12 | 12cm | 1
72 | 72clips | 1
3 PM | 3PM | 1
$5 | #### $5 in total | 1
$18 | #### 18 dollars a day | 1
5 cm | 5 cm in length | 1
18 dollars | 18 in total | 1
5 cm | 5 km in length | 0
# as a program prints them: exact_number, same_output
18 | 18 | 1
18 | 18.0 | 1
18.0 | 18 | 1
18 | 18.5 | 0
18 | 17 | 0
-18 | 18 | 0
0.5 | .5 | 1
0.5 | 0.50 | 1
0.25 | 2.5e-1 | 1
1e9 | 1000000000 | 1
1000000006 | 1e9 | 0
1000000006.0 | 1000000006 | 1
1e-05 | 0.00001 | 1
1e22 | 10000000000000000000000 | 1
10000000000000000000001 | 1e22 | 0
999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999 | 0.0 | 0
0.0 | 999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999 | 0
1e90 | 1000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000 | 1
# more than one number or letters
1234 | 1 234 | 1
2^{10} | 1024 | 1
10! | 3628800 | 1
120 | 5! | 1
288\pi \text{ cm}^3 | 288\pi | 1
288\pi \text{ cm}^3 | 288\pi \text{ m}^3 | 0
4210_{5} | 4210 base 5 | 1
18 | eighteen | 0
# roots, pi, powers, complex numbers
\sqrt{12} | 2\sqrt{3} | 1
2\sqrt3 | 2√3 | 1
2\sqrt{3} | 2*sqrt(3) | 1
\pi | π | 1
2\pi | 2π | 1
\frac{\pi}{6} | \pi/6 | 1
3 | 3\pi | 0
3 | 3 pi | 0
6 - 5i | \boxed{-5i+6} | 1
6 - 5i | 6+5i | 0
3 \pm 2 \sqrt{2} | \boxed{3\pm2\sqrt{2}} | 1
\emptyset | ∅ | 1
\infty | ∞ | 1
\infty | -\infty | 0
# algebra
x+1 | 1+x | 1
x+1 | x-1 | 0
m^2 | m^2 | 1
m^2 | m² | 1
x^2+2x+1 | \boxed{(x+1)^2} | 1
3R^2 | 3R^{2} | 1
5m | 5 | 0
x=5 | 5 | 1
5 | x = 5 | 1
x=5 | x=6 | 0
\cot x | \boxed{\cot{x}} | 1
1+x^2 | \boxed{1+x} | 0
1+x^2 | \boxed{x^2+1} | 1
2x^2 | 2x | 0
4\pi r^2 | 4\pi r | 0
a^2+b^2 | b^2+a^2 | 1
3x^2 | x^2\cdot 3 | 1
25 - n^2 | (5-n)(5+n) | 1
\frac{1}{x^2} | x^{-2} | 1
2ab | 2 | 0
6xyz | 6 | 0
2ab | 2cd | 0
2ab | The answer is 2ab. | 1
5 | 5/ab | 0
2 | 2ln | 0
5 | 5/m | 0
3 ab^2 | 3 | 0
\frac{1}{2}bh | \frac12 | 0
2 \pi h | 2\pi | 0
AB | BA | 0
-5 | \boxed{negative 5} | 1
# sets, tuples, intervals, inequalities, matrices
1,-2 | \boxed{-2, 1} | 1
3, 5, 7 | 3,5,7 | 1
3, 5, 7 | 3,5 | 0
5 or 6 | 5, 6 | 1
\{1,2\} | \{2,1\} | 1
\{1,2\} | \{1,3\} | 0
(1,2) | (1, 2) | 1
(3,1) | \boxed{\left(3, 1\right)} | 1
(3,1) | (1,3) | 0
(3,4] | \left(3,4\right] | 1
(3,4] | [3,4] | 0
(2,\infty) | (2,∞) | 1
x \in [-2,7] | [-2,7] | 1
x < 3 | x < 3 | 1
x < 3 | 3 > x | 1
x < 3 | x \le 3 | 0
x ≤ 3 | \boxed{x \leq 3} | 1
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}} | 1
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}} | 0
1:2 | \boxed{1:2} | 1
1:2 | 2:1 | 0
# words, choices, times
\text{Evelyn} | \boxed{Evelyn} | 1
\text{Evelyn} | Evelyn. | 1
\text{Evelyn} | \boxed{\text{evelyn}} | 1
\text{Evelyn} | Navin | 0
\text{east} | \boxed{\text{seat}} | 0
\text{even} | The answer is even. | 1
\text{even} | odd | 0
May | May | 1
\text{even} | **The answer is even** | 1
3 PM | 3 AM | 0
£5 | 5 pounds | 1
Yes | yes | 1
yes | no | 0
True | False | 0
\text{(C)} | \boxed{C} | 1
\text{(C)} | \boxed{\textbf{(C)}} | 1
(C) | C. | 1
\text{(C)} | \boxed{\text{(D)}} | 0
C | The answer is (C). | 1
D | \boxed{D. 5} | 1
D | \boxed{\textbf{(D)}\ 5} | 1
D | The answer is D) 5 | 1
D | The answer is (D) Paris. | 1
D | The answer is D: Paris | 1
C | The answer is option C | 1
C | \boxed{D. 5} | 0
C | \boxed{\textbf{(D)}\ 5} | 0
C | The answer is D) 5 | 0
D | The answer is option C | 0
3:00 PM | 3:00 p.m. | 1
3:00 PM | 3:00 AM | 0
3:00 | \boxed{4:00} | 0
# where the answer stands
4 | <think>The answer is \boxed{5}? No.</think> \nThe answer is 4. | 1
5 | <think>The answer is \boxed{5}? No.</think> \nThe answer is 4. | 0
5 | <think>It is \boxed{5}.</think> | 1
42 | #### Conclusion \nThe answer is 42. | 1
42 | The answer is 42. I checked it 3 times. | 1
42 | **Answer:** 42 | 1
42 | So 6 * 7 = 42. | 1
42 | #### 42 \n#### Step 2 | 1
2 | #### Step 2 \nIt is 30. | 0
72 | He sold 72 clips in total. | 1
72 | 72 clips \n#### 72 | 1
3/4 | So the probability is $\frac{3}{4}$. | 1
x < 3 | Hence **x < 3** | 1
9. It is \n#### 5 | 5 | 1
#### Step 1 \nAdd. \n#### Step 2 \nSo it is 30. | \boxed{30} | 1
#### Step 1 \nAdd. \n#### Step 2 \nSo it is 30. | \boxed{2} | 0
"""


def pairs(judge):
    """(gold, completion, right?) of the groups that name the judge; `math` holds all."""
    found, named = [], True
    for line in TABLE.strip().splitlines():
        if line.startswith("# "):
            named = judge == "math" or judge in line
        elif named:
            gold, completion, right = (part.strip().replace(" \\n", "\n") for part in line.split(" | "))
            found.append((gold, completion, right == "1"))
    return found


def judged(name, asked, **knobs):
    """The value that the reward gives for each (gold, completion), or the reason of its failure."""
    reward = build_reward(name, timeout_s=60.0, **knobs)

    async def one(gold, completion):
        given = {"prompt": "", "completion": completion, "prompt_ids": (), "completion_ids": ()}
        try:
            return (await reward(**given, row={"answer": gold})).value
        except RewardFailure as failure:
            return failure.reason

    async def all_of_them():
        return await asyncio.gather(*(one(gold, completion) for gold, completion in asked))

    try:
        return asyncio.run(all_of_them())
    finally:
        reward.close()


@pytest.mark.parametrize("name", ["math", "exact_number"])
def test_answers_are_the_same_as_the_table_says(name):
    table = pairs(name)
    knobs = {"workers": 1} if name == "math" else {}
    values = judged(name, [(gold, completion) for gold, completion, _ in table], **knobs)
    assert len(table) >= (200 if name == "math" else 120)
    assert [row for row, value in zip(table, values, strict=True) if value != float(row[2])] == []


PROSE = "9. Anya climbs one floor, Vanya five: five times longer."


@pytest.mark.parametrize(
    ("gold", "completion", "said"),
    [
        (PROSE, r"\boxed{5}", "answer_unreadable"),
        (PROSE, r"\boxed{9}", "answer_unreadable"),
        (PROSE, PROSE.upper(), 1.0),
        ("It depends on the speed", r"\boxed{It depends on the  speed.}", 1.0),
        ("It depends on the speed", r"\boxed{yes}", "answer_unreadable"),
        ("First add.\nThen Anya is older than Boris and Vera.", "7", "answer_unreadable"),
        ("# Solution\nAdd 2 and 5.\n\nThe answer is 7.", "7", 1.0),
        ("It follows.\n#### even", "The answer is even.", 1.0),
        ("It follows.\n#### even", "The answer is odd.", 0.0),
    ],
)
def test_a_gold_that_is_prose_is_a_failure_and_not_a_zero_unless_the_texts_are_equal(gold, completion, said):
    assert judged("math", [(gold, completion)]) == [said]


def test_numbers_of_list_items_and_of_headings_are_no_answers():
    assert judged("exact_number", [(PROSE, "9"), ("", "9")]) == ["row_unfit", "row_unfit"]
    assert judged("exact_number", [("30", "1. We add.\n2. It is 30.\n#### Step 3")]) == [1.0]


def test_outputs_of_programs_are_the_same_as_the_table_says():
    table = pairs("same_output")
    assert len(table) >= 18
    assert [row for row in table if same_output(row[1], row[0], 1e-6) is not row[2]] == []
    assert not same_output("0.0", "9" * 309, 1e-6) and not same_output("9" * 309, "9" * 308 + "8.0", 1e-6)
