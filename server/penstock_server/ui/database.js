// IndexedDB with promises. Knows nothing of what is kept.

/** Opens a database; null where the browser gives none (blocked storage, some private windows). `stores`: name ->
 * key path. */
export function openDatabase(name, stores) {
  return new Promise((resolve) => {
    try {
      const opening = indexedDB.open(name, 1);
      opening.onupgradeneeded = () => {
        for (const [store, keyPath] of Object.entries(stores))
          opening.result.createObjectStore(store, { keyPath });
      };
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = opening.onblocked = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
}

/** The result of one request to a store. */
export const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Does `work(stores)` in one transaction on all stores, and returns its result once everything is written. All of
 * it is written, or nothing. Throws DOMException (QuotaExceededError if the browser has no more room). */
export async function transact(database, mode, work) {
  const names = [...database.objectStoreNames];
  const transaction = database.transaction(names, mode);
  const end = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const stores = Object.fromEntries(names.map((name) => [name, transaction.objectStore(name)]));
  let made;
  try {
    made = await work(stores);
    transaction.commit(); // at once: the page may be about to be left
  } catch (error) {
    if (error.name !== "AbortError") abort(transaction);
    // A transaction that the browser ended tells why.
    throw await end.then(
      () => error,
      (cause) => cause ?? error,
    );
  }
  await end;
  return made;
}

function abort(transaction) {
  try {
    transaction.abort();
  } catch {
    // it has ended already
  }
}
