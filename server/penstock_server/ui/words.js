// The words that the page shows, in the reader's language. Each text has a key, and stands in both tables,
// english.js and chinese.js. In a text, {name} stands for a value.

import { CHINESE } from "./chinese.js";
import { ENGLISH } from "./english.js";

const TABLES = { en: ENGLISH, zh: CHINESE };

/** The first of the reader's languages that the page has. Any Chinese ("zh-TW") reads simplified characters. */
export const language =
  navigator.languages.map((tag) => tag.split("-")[0].toLowerCase()).find((tag) => tag in TABLES) ?? "en";
const table = TABLES[language];

/** words("layerOf", {layer: 3, total: 48}): the text of a key with its values. */
export function words(key, values = {}) {
  return table[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** The text of a key in English, for a model that knows English alone. */
export const inEnglish = (key) => ENGLISH[key];

/** count(2, "tokens"): a number of things. English has two forms in one text: "{n} token|{n} tokens". */
export function count(number, key) {
  const forms = table[key].split("|");
  return forms[number === 1 ? 0 : forms.length - 1].replace("{n}", number.toLocaleString("en"));
}

/** Gives the elements of index.html their words: data-words names the text, data-label the name (and the tooltip
 * of a button), data-placeholder the text of an empty field. */
export function fillWords() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : language;
  for (const place of document.querySelectorAll("[data-words]"))
    place.textContent = words(place.dataset.words);
  for (const place of document.querySelectorAll("[data-placeholder]"))
    place.placeholder = words(place.dataset.placeholder);
  for (const place of document.querySelectorAll("[data-label]")) {
    place.ariaLabel = words(place.dataset.label);
    if (place.localName === "button") place.title = place.ariaLabel;
  }
}
