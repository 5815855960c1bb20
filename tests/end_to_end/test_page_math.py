"""What a model writes, as the page shows it: formulas, prices, tables; and that none of it can act."""

from __future__ import annotations

import pytest

from fakes import FakeAsyncEngine

from .browser import OpenPage, Page, answer, expect, say, serving, wait_until_done

#: Markdown -> the formulas in it, as KaTeX got them. What is no formula is a text of the page.
FORMULAS = [
    (r"The area is \(\pi r^2\), so.", [r"\pi r^2"]),
    ("\\[\nx\n= \\frac{-b}{2a}\n- c\n\\]", ["\nx\n= \\frac{-b}{2a}\n- c\n"]),
    ("Text:\n$$\n\\begin{aligned} a&=b\\\\[2pt] c&=d\\end{aligned}\n$$\nmore", [
        "\n\\begin{aligned} a&=b\\\\[2pt] c&=d\\end{aligned}\n"]),
    ("\\begin{align}\na&=b\\\\\nc&=d\n\\end{align}", ["\\begin{align}\na&=b\\\\\nc&=d\n\\end{align}"]),
    ("1. One:\n   \\[\n   x\n   \\]\n2. Two \\(y\\)", ["\nx\n", "y"]),
    (r"$x$ is 3, the $n$-th, the $i$th, $\alpha_1 * b_2 * c$, *and $a*b$ too*", [
        "x", "n", "i", r"\alpha_1 * b_2 * c", "a*b"]),
    (r"**$f(x) = a*b*c$** and **$a_1$**, 10\$ and $\$5$", ["f(x) = a*b*c", "a_1", r"\$5"]),
    (r"| a | \(y\) |" + "\n|-|-|\n| $x$ | $$z$$ |", ["y", "x", "z"]),
    (r"$A=\{1,2\}$; $\text{if } x$; $2x$; $10\%$; $价$", [r"A=\{1,2\}", r"\text{if } x", "2x", r"10\%"]),
    ("It costs $5 and $10. From $5-$10, US$5 and A$6. $20,000 and $30,000. ($5)/($6), $5.00/$6.00", []),
    ("$5 (or 4€), the other $; a $5 bill/$ sign; $HOME/bin:$PATH; $5k, $6k; $5 more, or less, in $", []),
    ("I paid $5, she paid $7, total $12.\n价格是 $5 和 $6，或者$7。\\$3 and \\$4", []),
    ("costs $5 per $x$ and $6 per $y$", ["x", "y"]),
    (r"\[Your Name\], \[1\], \(optional words here\)", []),
    ("`$x$` and ``\\(y\\)``\n\n```\n$$x$$\n\\[y\\]\n```\n\n    $$z$$\n", []),
    ("```latex\n\\begin{align}\nx\n\\end{align}\n```", []),
]  # fmt: skip


def test_formulas_and_what_is_none(open_page: OpenPage) -> None:
    text = [markdown for markdown, _ in FORMULAS]
    with serving(FakeAsyncEngine(lambda prompt, params: [text.pop(0)])) as url:
        page = open_page(url)
        for markdown, formulas in FORMULAS:
            say(page, "Go on")
            wait_until_done(page)
            if formulas:
                expect(answer(page).locator(".math .katex")).to_have_count(len(formulas))
            found = (
                answer(page).locator(".math annotation").evaluate_all("all => all.map(e => e.textContent)")
            )
            assert found == formulas, markdown
        assert page.locator(".math > code").count() == 0, "KaTeX could not read one"


HOSTILE = [
    r"\(\href{javascript:document.title='broken'}{x}\)",
    r"\(\url{javascript:alert(1)}\)",
    r"\[\includegraphics[height=1em]{https://example.org/a.png}\]",
    r"\(\htmlClass{scrim}{x} \htmlId{prompt}{y} \htmlStyle{position:fixed}{z} \htmlData{a=b}{c}\)",
    r"$\text{<img src=x onerror=document.title='broken'>}$",
    r"\(<script>document.title='broken'</script>\)",
    r"\(\def\a{\a\a}\a\)",
    r"\(" + r"{" * 3000 + r"\)",
    r"$x^{" * 300 + "$",
    r'$"title="x" onmouseover="document.title=`broken`$',
    r"\(\gdef\alpha{broken}\alpha\)",
    r"$\alpha\pmb{x}$",
    r"\[\rule{900em}{900em}\kern-300em\raisebox{90em}{spoof}\]",
]


def test_a_formula_can_not_act(open_page: OpenPage) -> None:
    asked: list[str] = []
    text = "\n\n".join(HOSTILE) + "\n\nThe end, $x$."
    with serving(FakeAsyncEngine(lambda prompt, params: [text])) as url:
        page = open_page(url)
        page.on("request", lambda request: asked.append(request.url))
        say(page, "Hello")
        wait_until_done(page)
        body = answer(page).locator(".body")
        expect(body.locator(".katex").last).to_contain_text("x")
        assert body.locator("img, script, a, iframe, [onerror], [onmouseover], [id], .scrim").count() == 0
        assert page.locator("#prompt").count() == 1
        assert "broken" not in page.title() and all(each.startswith(url) for each in asked)
        # What one formula defines is gone with it.
        shown = body.locator(".math", has=page.locator("annotation", has_text=r"\alpha\pmb{x}"))
        expect(shown.locator(".katex-html")).to_contain_text("α")
        # A formula stays within its answer.
        outside = "document.elementFromPoint(640, 20).closest('.math') === null"
        assert page.evaluate(outside) and overflow(page) <= 0


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_a_formula_that_katex_can_not_read_is_shown_as_it_was_written(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(lambda prompt, params: [r"Here \(\foo{x}\) and $\frac{1}{$."])) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(answer(page).locator(".math > code")).to_have_text([r"\(\foo{x}\)", r"$\frac{1}{$"])


def test_katex_comes_with_the_first_formula_from_this_server(open_page: OpenPage) -> None:
    asked: list[str] = []
    texts = [r"With \(x^2\).", "No formula: $5."]
    with serving(FakeAsyncEngine(lambda prompt, params: [texts.pop()])) as url:
        page = open_page(url)
        page.on("request", lambda request: asked.append(request.url.removeprefix(url)))
        say(page, "Hello")
        wait_until_done(page)
        assert not any("katex" in each.lower() for each in asked)
        say(page, "Hello")
        expect(answer(page).locator(".katex")).to_have_count(1)
        page.evaluate("document.fonts.ready")
        found = {each for each in asked if "katex" in each.lower()}
        assert {"/ui/vendor/katex.js", "/ui/vendor/katex.css"} <= found
        assert any(each.endswith(".woff2") for each in found)
        assert page.evaluate(
            "[...document.fonts].some(f => f.family.includes('KaTeX') && f.status === 'loaded')"
        )


def test_formulas_are_copied_as_they_were_written(open_page: OpenPage) -> None:
    text = "So \\(x^2\\) is\n\n\\[\ny\n\\]\n\nand `$z$`."
    with serving(FakeAsyncEngine(lambda prompt, params: [text])) as url:
        page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
        say(page, "Hello")
        wait_until_done(page)
        expect(answer(page).locator(".katex")).to_have_count(2)
        body = answer(page).locator(".body")
        body.evaluate("body => getSelection().selectAllChildren(body)")
        page.keyboard.press("Control+c")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.split() == ["So", r"\(x^2\)", "is", r"\[", "y", r"\]", "and", "$z$."]
        answer(page).get_by_role("button", name="Copy").click()
        expect(answer(page).get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == text


@pytest.mark.inner
@pytest.mark.parametrize("size", [1, 7])
def test_a_text_that_grows_is_shown_as_the_whole_is(open_page: OpenPage, size: int) -> None:
    """Blocks are made once: what is shown in the end, and before it, is what the whole text gives."""
    text = (
        "# One\n\nA *b* \\(x\\)\r\nc\n\n\\[\na\n- b\n\n= c\n\\]\n\n- one\n\n  two\n- three\n\n1. x\n2. y\n\n"
        "| a | b |\n|--:|:-:|\n| 1 | 2 |\n\n```py\nx = 1\n\ny\n```\n> q\n> r\n\n"
        "end\n===\n\n    code\n\n    more\n\nlast"
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    with serving(FakeAsyncEngine(lambda prompt, params: ["ok"])) as url:
        page = open_page(url)
        grown, whole = page.evaluate(
            """async (pieces) => {
              const { GrowingMarkdown, markdown } = await import("/ui/markdown.js");
              const [grown, whole] = [document.createElement("div"), document.createElement("div")];
              const growing = new GrowingMarkdown(grown);
              let text = "";
              for (const piece of pieces) growing.update(text += piece);
              whole.append(markdown(text));
              return [grown.innerText, whole.innerText];
            }""",
            pieces,
        )
        assert grown.split() == whole.split() and "One" in grown


def test_tables_and_lists_keep_their_forms(open_page: OpenPage) -> None:
    text = "| a | b | c |\n|:--|:-:|--:|\n| 1 | 2 | 3 |\n\n7. seven\n8. eight\n"
    with serving(FakeAsyncEngine(lambda prompt, params: [text])) as url:
        page = open_page(url)
        say(page, "Hello")
        wait_until_done(page)
        for kind in ("th", "td"):
            cells = answer(page).locator(kind)
            sides = cells.evaluate_all("all => all.map(each => getComputedStyle(each).textAlign)")
            assert sides == ["start", "center", "end"]
        assert answer(page).locator("ol").get_attribute("start") == "7"
