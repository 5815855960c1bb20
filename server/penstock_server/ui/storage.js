// Small settings: localStorage, or memory where the browser gives none (private windows, blocked storage).

const memory = new Map();

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

/** Stores a value; null removes it. A value that the browser refuses is kept until the page is left. */
export function remember(name, text) {
  memory.delete(name);
  try {
    if (text === null) storage()?.removeItem(name);
    else if (storage()) storage().setItem(name, text);
    else memory.set(name, text);
  } catch {
    memory.set(name, text);
  }
}

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
  return names.filter((name) => name.startsWith(prefix));
}
