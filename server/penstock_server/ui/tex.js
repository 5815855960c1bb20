// Where a model's text has formulas: \(..\), \[..\], $$..$$, $..$, and \begin{align}..\end{align} on lines of its
// own. These are extensions of marked, so that code stays code. Prices stay text: see `inDollars`.
//
// A formula becomes <span class="math" title="as it was written">TeX</span>; math.js draws the formula there.

/** The longest formulas in characters. Signs without an end are looked for no further. */
const LONGEST = { inline: 2000, block: 10_000 };
const ENVIRONMENTS = "equation|align|alignat|gather|multline|CD";

/** Words side by side that stand in no group (\text{..} is one), or letters that no formula has. */
function isProse(tex) {
  const outside = tex.replace(/\\?[a-zA-Z]*\{[^{}]*\}/g, "{}");
  return (
    /(?<![\\A-Za-z])[A-Za-z]{2,}[,;:]?\s+[A-Za-z]{2,}/.test(outside) ||
    /[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef]/.test(outside)
  );
}

/** Nothing but words and numbers, as in \[Your Name\] and \[1\]: the signs are escapes of Markdown there. */
const isWords = (tex) =>
  /^(?:\p{L}{2,}|\d+)(?:[\s.,:!?'’-]+(?:\p{L}+|\d+))*[.!?]?$/u.test(tex.trim());

/** A formula must not reach over a fence of code; in $$..$$ not over an empty line either. */
const isBroken = (tex, isBracket) =>
  /^ {0,3}(?:\x60{3}|~~~)/m.test(tex) || (!isBracket && /\n[ \t]*\n/.test(tex));

/** As Pandoc reads dollars: no space follows the first sign, none stands before the last one, and no digit follows
 * it. And no letter or digit stands around the signs (A$5, $HOME/$USER). */
const DOLLARS = /^\$(?![\s$])((?:\\[^\n]|[^\\$\n\x60])+?)(?<!\s)\$(?!(?!th\b)[\p{Script=Latin}\d$])/u;
const DOUBLE_DOLLARS = /^\$\$((?:\\[\s\S]|[^\\$\x60])+?)\$\$(?!\$)/;
const PARENTHESES = /^\\\(((?:[^\\\x60]|\\[^)])+?)\\\)/;
const BRACKETS = /^\\\[((?:[^\\\x60]|\\[^\]])+?)\\\]/;

/** The formula between dollars at the start of `text`. `before`: the character in front of it. */
function inDollars(text, before) {
  const found = DOLLARS.exec(text);
  if (!found || /[\p{Script=Latin}\d$\\]/u.test(before)) return undefined;
  // "$5 more" begins no formula, "$2x" does; nor does "$5 for each of them, in $".
  const isPrice = /^\d[\d.,]*\s*[A-Za-z]{2,}/.test(found[1]);
  return isPrice || isProse(found[1]) ? undefined : found;
}

/** The formula at the start of a piece of a paragraph, as a token of marked; or undefined. */
function inlineFormula(rest, before) {
  const text = rest.slice(0, LONGEST.inline);
  const double = DOUBLE_DOLLARS.exec(text);
  const brackets = BRACKETS.exec(text);
  const parentheses = PARENTHESES.exec(text);
  const found =
    double ??
    (brackets && !isWords(brackets[1]) ? brackets : null) ??
    (parentheses && !isProse(parentheses[1]) ? parentheses : null) ??
    inDollars(text, before);
  if (!found?.[1].trim() || isBroken(found[1])) return undefined;
  return formula("inlineMath", found[0], found[1], found === double || found === brackets);
}

const formula = (type, raw, tex, isDisplay) => ({ type, raw, tex, isDisplay });

const BLOCK = new RegExp(
  String.raw`^ {0,3}(?:\$\$(?!\$)([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]|` +
    String.raw`(\\begin\{((?:${ENVIRONMENTS})\*?)\}[\s\S]+?\\end\{\4\})) *(?:\n+|$)`,
);
const BEGUN = new RegExp(String.raw`^ {0,3}(?:\$\$(?!\$)|(\\\[)|\\begin\{(?:${ENVIRONMENTS})\*?\})`);
const BLOCK_START = /\n {0,3}(?:\$\$|\\\[|\\begin\{)/;

/** The formula on lines of its own at the start of `rest`; or undefined. isGrowing: more of the text is to come. */
function blockFormula(rest, isGrowing) {
  const begun = BEGUN.exec(rest);
  if (!begun) return undefined;
  const text = rest.slice(0, LONGEST.block);
  const found = BLOCK.exec(text);
  const isBracket = begun[1] !== undefined;
  if (found) {
    const tex = found[1] ?? found[2] ?? found[3];
    if (!tex.trim() || isBroken(tex, isBracket) || (isBracket && isWords(tex))) return undefined;
    return formula("blockMath", found[0], tex, true);
  }
  // Its end is to come: until then its lines are no lists and no headings.
  if (!isGrowing || text.length < rest.length || /\$\$ *\S|\\\]/.test(text.slice(begun[0].length)))
    return undefined;
  return isBroken(text, isBracket) ? undefined : { ...formula("blockMath", text, text, true), isOpen: true };
}

export const escape = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

const span = ({ tex, raw, isDisplay }) =>
  `<span class="${isDisplay ? "math display" : "math"}" title="${escape(raw.trim())}">${escape(tex)}</span>`;

/** Extensions for `Marked.use`. isGrowing(): more of the text is to come. */
export const texExtensions = (isGrowing) => ({
  extensions: [
    {
      name: "blockMath",
      level: "block",
      // A paragraph ends with an empty line, if not before.
      start: (text) => {
        const end = text.indexOf("\n\n");
        const found = BLOCK_START.exec(end < 0 ? text : text.slice(0, end));
        return found ? found.index + 1 : undefined;
      },
      tokenizer: (text) => blockFormula(text, isGrowing()),
      renderer: (token) =>
        token.isOpen ? `<p><code>${escape(token.raw)}</code></p>` : `<p>${span(token)}</p>`,
    },
    {
      name: "inlineMath",
      level: "inline",
      start: (text) => {
        const at = text.search(/\$|\\[([]/);
        return at < 0 ? undefined : at;
      },
      tokenizer: (text, tokens) =>
        /^(?:\$|\\[([])/.test(text) ? inlineFormula(text, tokens.at(-1)?.raw.at(-1) ?? "") : undefined,
      renderer: span,
    },
  ],
  // Stars and low lines of a formula are no emphasis.
  hooks: {
    emStrongMask: (text) =>
      text.replace(/(\$\$?)(?![\s$])[^$\n\x60]+?(?<!\s)\1(?![\p{Script=Latin}\d])/gu, (math) =>
        "a".repeat(math.length),
      ),
  },
});
