// Text files that go with the next message: their names above the message box, their texts in the message. Files
// come by the button, by a drop anywhere on the page, or pasted.

import { byId, element, icon, iconButton } from "./dom.js";
import { bytes } from "./figures.js";
import { words } from "./words.js";

/** The longest file in bytes. More does not fit into the context of any model that one waits for. */
const LONGEST_BYTES = 1 << 20;

/** The type of what is dropped, if files are. */
const DROPPED = "Files";

/** Pictures by their names, where the browser knows no type. */
const PICTURE = /\.(?:avif|bmp|gif|heic|ico|jpe?g|png|tiff?|webp)$/i;

export class Attachments {
  #files = []; // {name, text}
  #warn;

  /** warn(sentence) tells why a file can't be attached. */
  constructor(warn) {
    this.#warn = warn;
    const input = byId("attach-input");
    byId("attach").append(icon("attach"));
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.add(input.files);
      input.value = ""; // the same file may be chosen again
    });
    this.#takeDropped();
    this.#takePasted();
  }

  get isEmpty() {
    return this.#files.length === 0;
  }

  /** Attaches files. What is no text is refused, and the reader is told why. */
  async add(files) {
    const reasons = [];
    if (byId("attach").hidden) reasons.push(words("filesInChats"));
    else
      for (const file of files) {
        try {
          this.#files.push({ name: file.name, text: await readText(file) });
        } catch (error) {
          reasons.push(error.message);
        }
      }
    this.#warn(reasons.join(" ") || null);
    this.#show();
  }

  /** `text` with the attached texts behind it. Nothing is attached then. */
  takeInto(text) {
    const parts = [text, ...this.#files.map(inFence)].filter(Boolean);
    this.#files = [];
    this.#show();
    return parts.join("\n\n");
  }

  #show() {
    const place = byId("attached");
    place.hidden = this.isEmpty;
    place.replaceChildren(
      ...this.#files.map((file) => {
        const label = words("detach", { name: file.name });
        const remove = iconButton("close", label, () => {
          this.#files = this.#files.filter((each) => each !== file);
          this.#show();
        });
        return element(
          "li",
          {},
          element("span", { class: "attached-name" }, file.name),
          element("span", { class: "attached-size" }, bytes(new Blob([file.text]).size)),
          remove,
        );
      }),
    );
  }

  /** The whole page takes files: elsewhere, the browser would leave the page to show the file. */
  #takeDropped() {
    const hasFiles = (event) => event.dataTransfer?.types.includes(DROPPED);
    document.addEventListener("dragover", (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  #takePasted() {
    document.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData ?? {};
      // Office programs give a picture of the text beside the text.
      if (!files?.length || types.includes("text/plain")) return;
      event.preventDefault();
      this.add([...files]);
    });
  }
}

/** The text of a file in UTF-8. Throws Error. */
async function readText(file) {
  const { name, size, type } = file;
  if (type.startsWith("image/") || PICTURE.test(name)) throw new Error(words("noPictures", { name }));
  if (size > LONGEST_BYTES) throw new Error(words("fileTooLong", { name, most: bytes(LONGEST_BYTES) }));
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // below
  }
  throw new Error(words("fileNoText", { name }));
}

/** A file as a block of Markdown: a fence that is longer than any in the text. */
function inFence({ name, text }) {
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  const language = /\.(\w+)$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}
