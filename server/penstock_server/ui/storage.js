// localStorage, or memory where the browser gives none (private windows, blocked storage).

const memory = new Map();
let isFull = false;

function storage() {
  try {
    return globalThis.localStorage;
  } catch {
    return null;
  }
}

export function recall(name) {
  return memory.get(name) ?? storage()?.getItem(name) ?? null;
}

/** Stores a value; null removes it. A value that the browser refuses is kept until the page is left, and
 * isStorageFull() is true then. */
export function remember(name, text) {
  memory.delete(name);
  try {
    if (text === null) storage()?.removeItem(name);
    else if (storage()) storage().setItem(name, text);
    else memory.set(name, text);
    isFull = false;
  } catch {
    memory.set(name, text);
    isFull = true;
  }
}

export const isStorageFull = () => isFull;

export function recallJson(name, fallback) {
  try {
    return JSON.parse(recall(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function namesWith(prefix) {
  const kept = storage();
  const names = kept ? Array.from({ length: kept.length }, (_, index) => kept.key(index)) : [];
  return [...new Set([...names, ...memory.keys()])].filter((name) => name.startsWith(prefix));
}
