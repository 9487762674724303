// Search runs in a worker, and browsers refuse workers to pages that are opened from disk. There it runs in an iframe.
// The interface is that of a worker as far as the theme uses it: messages, errors and importScripts.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        const page = this.scope.document;
        this.scope.postMessage = (data) => this.answer(data);
        this.scope.importScripts = (...urls) =>
          urls.reduce((before, each) => before.then(() => this.load(page, each)), Promise.resolve());
        this.load(page, url).then(resolve);
      });
    }

    load(page, url) {
      return new Promise((resolve, reject) => {
        const script = page.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        page.body.append(script);
      });
    }

    answer(data) {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event);
      this.dispatchEvent(event);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  }
  window.Worker = window.IFrameWorker = IFrameWorker;
}
